// Products by AMX, which Intel's server CPUs have since 2023: 16 tokens by 64 columns at once.
//
// TDPBF16PS takes 16 words of k. It adds the even numbers' products in one chain that begins at zero, the odd ones' in
// another, then both, then that to what was there. No other instruction adds in that order: these bits are the same for any
// batch, chunking and number of threads, but not those of VDPBF16PS.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
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

// What the eight registers hold, as LDTILECFG takes it: 0 to 3 sums [rows][16], 4 numbers [rows][words] of the tokens,
// 5 to 7 weights [words][16 columns].
class AmxRegisters {
 public:
  AmxRegisters(std::int64_t rows, std::int64_t words) {
    struct alignas(64) {
      std::uint8_t palette = 1, start = 0, reserved[14] = {};
      std::uint16_t bytes[16] = {};
      std::uint8_t rows[16] = {};
    } shapes;
    for (int i = 0; i < 8; ++i) {
      shapes.bytes[i] = std::uint16_t(i == 4 ? 4 * words : 64);
      shapes.rows[i] = std::uint8_t(i <= 4 ? rows : words);
    }
    _tile_loadconfig(&shapes);
  }
  ~AmxRegisters() { _tile_release(); }
};

// sums [rows][64 columns] += a [rows][words] . panel, for up to 16 rows; meanwhile `lines` lines a word are asked for
// from `ahead` on.
template <int lines>
void amx_sums(Lanes (*sums)[4], const Num* a, std::int64_t stride, const Num* panel, std::int64_t words,
              std::int64_t rows, const Num* ahead) {
  constexpr int kColumns = 64, kLineBytes = 64, kRowBytes = kColumns * 4;
  char* const to = (char*)sums;
  for (std::int64_t k = 0, upto; k < words; k = upto) {
    // All that are whole, then the rest.
    upto = words - k < kAmxWords ? words : words - words % kAmxWords;
    const AmxRegisters set(rows, std::min<std::int64_t>(kAmxWords, words - k));
    _tile_loadd(0, to, kRowBytes);
    _tile_loadd(1, to + 64, kRowBytes);
    _tile_loadd(2, to + 128, kRowBytes);
    _tile_loadd(3, to + 192, kRowBytes);
    for (; k < upto; k += kAmxWords) {
      const char* weights = (const char*)(panel + k * kColumns * kPerWord);
      for (int i = 0; i < lines * kAmxWords; ++i) fetch((const char*)ahead + (k * lines + i) * kLineBytes);
      _tile_loadd(4, a + k * kPerWord, stride * std::int64_t(sizeof(Num)));
      _tile_loadd(5, weights, kRowBytes);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, weights + 64, kRowBytes);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, weights + 128, kRowBytes);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, weights + 192, kRowBytes);
      _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, to, kRowBytes);
    _tile_stored(1, to + 64, kRowBytes);
    _tile_stored(2, to + 128, kRowBytes);
    _tile_stored(3, to + 192, kRowBytes);
  }
}
