// A thread and its helpers, which take pieces of work as they come free. A phase ends when its pieces are done, not
// when all threads have come to its end: one that has lost its core holds up the piece that it had taken, if any.
// OpenMP's barriers wait for every thread after every phase, of which a step has a hundred (bench/engine).
//
// Each thread that computes has a team of its own for as long as it lives. Between phases helpers look for the next
// one for a while and then sleep.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

// As VDPBF16PS has it: what is too small for a normal number is zero, read or written (DAZ, FTZ).
class TinyIsZero {
 public:
  TinyIsZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~TinyIsZero() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

class Team {
 public:
  const int size;  // how many were asked for

  // The calling thread's own team, of so many threads with itself.
  static Team& of_this_thread(std::int64_t threads) {
    thread_local std::unique_ptr<Team> team;
    const int size = int(std::max<std::int64_t>(1, threads));
    if (!team || team->size != size) {
      team.reset();
      team.reset(new Team(size));
    }
    return *team;
  }

  ~Team() {
    {
      std::lock_guard lock(mutex_);
      is_over_ = true;
    }
    awake_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

  // Run piece(i) for i in [0, count), in about that order; return when all have been run.
  template <class Piece>
  void run(std::int64_t count, Piece&& piece) {
    if (helpers_.empty() || count == 1) {
      for (std::int64_t i = 0; i < count; ++i) piece(i);
      return;
    }
    count_ = count;
    piece_ = &piece;
    call_ = [](void* piece, std::int64_t i) { (*static_cast<std::remove_reference_t<Piece>*>(piece))(i); };
    done_.store(0, std::memory_order_relaxed);
    open_.store((std::uint64_t(++phase_) << 32) | std::uint64_t(count));  // in one order with `sleeping_`
    if (sleeping_.load()) {
      { std::lock_guard lock(mutex_); }
      awake_.notify_all();
    }
    take_pieces();
    for (int looks = 0; done_.load(std::memory_order_acquire) != count; ++looks)
      looks < kLooks ? _mm_pause() : std::this_thread::yield();
  }

 private:
  static constexpr int kLooks = 20000;  // before a thread gives its core to others

  explicit Team(int threads) : size(threads) {
    try {
      while (int(helpers_.size()) + 1 < threads) helpers_.emplace_back([this] { help(); });
    } catch (const std::system_error&) {  // no more are granted: those that are there do all
    }
  }

  // The one who owns a piece of a phase may read what the phase is: it does not end before the piece is done.
  void take_pieces() {
    for (std::uint64_t open = open_.load(); std::uint32_t(open);) {
      if (!open_.compare_exchange_weak(open, open - 1)) continue;
      call_(piece_, count_ - std::uint32_t(open));
      done_.fetch_add(1, std::memory_order_release);
      open = open_.load();
    }
  }

  void help() {
    TinyIsZero always;
    for (;;) {
      for (int looks = 0; !std::uint32_t(open_.load(std::memory_order_relaxed)); ++looks) {
        if (looks < kLooks) {
          _mm_pause();
          continue;
        }
        std::unique_lock lock(mutex_);
        sleeping_.fetch_add(1);
        awake_.wait(lock, [this] { return is_over_ || std::uint32_t(open_.load()); });
        sleeping_.fetch_sub(1);
        if (is_over_) return;
        looks = 0;  // others may have done this phase while it woke, and the next one is near
      }
      take_pieces();
    }
  }

  // The phase's number above, how many of its pieces nobody has taken below.
  alignas(64) std::atomic<std::uint64_t> open_{0};
  alignas(64) std::atomic<std::int64_t> done_{0};
  alignas(64) std::int64_t count_ = 0;
  void* piece_ = nullptr;
  void (*call_)(void*, std::int64_t) = nullptr;
  std::uint32_t phase_ = 0;
  std::atomic<int> sleeping_{0};
  bool is_over_ = false;
  std::mutex mutex_;
  std::condition_variable awake_;
  std::vector<std::thread> helpers_;
};
