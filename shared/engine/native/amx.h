// Products by AMX, which Intel's server CPUs have since 2023: 16 tokens by 64 columns at once.
//
// TDPBF16PS takes 16 words of k. It adds the even numbers' products in one chain that begins at zero, the odd ones' in
// another, then both, then that to what was there. No other instruction adds in that order: these bits are the same for any
// batch, chunking and number of threads, but not those of VDPBF16PS.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "lanes.h"

constexpr int kAmxRows = 16;   // tokens of a tile
constexpr int kAmxWords = 16;  // of k that one multiplication takes

// Ask Linux for the registers, once a process; 0, or an errno.
inline int grant_tiles() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) ? errno : 0;
}

// GCC's intrinsics do not say what memory they read: what was written before must not be left for later.
inline void write_now() { asm volatile("" ::: "memory"); }

// What the eight registers hold, as LDTILECFG takes it: 0 to 3 sums [rows][16], 4 numbers [rows][words] of the tokens,
// 5 to 7 weights [words][16 columns].
class AmxRegisters {
 public:
  // To be said before each multiplication; costs nothing where it was said before.
  void shape(std::int64_t rows, std::int64_t words) {
    if (rows == rows_ && words == words_) return;
    rows_ = rows, words_ = words;
    struct alignas(64) {
      std::uint8_t palette = 1, start = 0, reserved[14] = {};
      std::uint16_t bytes[16] = {};
      std::uint8_t rows[16] = {};
    } shapes;
    for (int i = 0; i < 8; ++i) {
      shapes.bytes[i] = std::uint16_t(i == 4 ? 4 * words : 64);
      shapes.rows[i] = std::uint8_t(i <= 4 ? rows : words);
    }
    write_now();
    _tile_loadconfig(&shapes);
  }
  ~AmxRegisters() { _tile_release(); }

 private:
  std::int64_t rows_ = 0, words_ = 0;
};

// sums [rows][64 columns] += a [rows][words] . panel, or = with is_first; words in as many of one multiplication as the
// registers are set for; strides are in bytes. Meanwhile `lines` lines a word are asked for from `ahead` on: four are those
// of the panel's own next words, which are wanted soon.
template <int lines = 0>
void amx_multiply(void* sums, std::int64_t sums_stride, const Num* a, std::int64_t a_stride, const Num* panel,
                  std::int64_t words, bool is_first, const char* ahead = nullptr) {
  constexpr int kLineBytes = 64, kWordBytes = 64 * 4;
  char* const to = (char*)sums;
  write_now();
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, to, sums_stride);
    _tile_loadd(1, to + 64, sums_stride);
    _tile_loadd(2, to + 128, sums_stride);
    _tile_loadd(3, to + 192, sums_stride);
  }
  for (std::int64_t k = 0; k < words; k += kAmxWords) {
    const char* weights = (const char*)panel + k * kWordBytes;
    for (int i = 0; i < lines * kAmxWords; ++i) {
      const char* line = ahead + (k * lines + i) * kLineBytes;
      lines == 4 ? fetch_near(line) : fetch(line);
    }
    _tile_loadd(4, a + k * kPerWord, a_stride);
    _tile_loadd(5, weights, kWordBytes);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, weights + 64, kWordBytes);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, weights + 128, kWordBytes);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, weights + 192, kWordBytes);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, to, sums_stride);
  _tile_stored(1, to + 64, sums_stride);
  _tile_stored(2, to + 128, sums_stride);
  _tile_stored(3, to + 192, sums_stride);
}
