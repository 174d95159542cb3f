// Sixteen float32 lanes, and the numbers that are loaded into them and stored from them: one register of
// AVX-512, or two of AVX2. Everything here gives the same bits on all of them; kernels.cpp is written in it.
//
// Numbers are bfloat16, or float32 with -DPD_FLOAT32. A word is 32 bits of them: a pair, or one.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

using bf16 = std::uint16_t;
#ifdef PD_FLOAT32
using Num = float;
#else
using Num = bf16;
#endif

constexpr int kPerWord = 4 / sizeof(Num);

// Bring a line into L2, or into L1. Not _mm_prefetch: GCC drops a loop that does nothing else.
inline void fetch(const void* p) { asm volatile("prefetcht1 %0" ::"m"(*(const char*)p)); }
inline void fetch_near(const void* p) { asm volatile("prefetcht0 %0" ::"m"(*(const char*)p)); }

using Mask = std::uint16_t;  // a bit a lane

inline Mask mask_of(std::int64_t count) {
  return count >= 16 ? 0xffff : count <= 0 ? 0 : Mask((1u << count) - 1);
}

inline float widen(bf16 v) {
  const std::uint32_t bits = std::uint32_t(v) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline float widen(float v) { return v; }

inline float sum_of(__m256 v) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline float most_of(__m256 v) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

#ifdef __AVX512F__

constexpr bool kHas32Registers = true;

using Lanes = __m512;
using Words = __m512i;  // sixteen words as they lie in memory

inline Lanes spread(float v) { return _mm512_set1_ps(v); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c
inline Lanes fnma(Lanes a, Lanes b, Lanes c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
inline Lanes max_of(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
inline Lanes min_of(Lanes a, Lanes b) { return _mm512_min_ps(a, b); }
inline Lanes nearest(Lanes v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Lanes times_power(Lanes v, Lanes n) { return _mm512_scalef_ps(v, n); }  // v * 2^n, n whole
inline Lanes select(Mask m, Lanes a, Lanes otherwise) { return _mm512_mask_mov_ps(otherwise, m, a); }
inline Mask equal(Lanes a, Lanes b) { return _mm512_cmpeq_ps_mask(a, b); }
inline float sum_of(Lanes v) { return sum_of(_mm512_castps512_ps256(v) + _mm512_extractf32x8_ps(v, 1)); }
inline float most_of(Lanes v) {
  return most_of(_mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
}

inline Lanes load16(const float* p) { return _mm512_loadu_ps(p); }
inline Lanes load16(const float* p, Mask m) { return _mm512_maskz_loadu_ps(m, p); }
inline void store16(float* p, Lanes v) { _mm512_storeu_ps(p, v); }
inline void store16(float* p, Lanes v, Mask m) { _mm512_mask_storeu_ps(p, m, v); }

inline Lanes widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

#ifdef __AVX512BF16__
inline __m256i narrow(Lanes v) { return (__m256i)_mm512_cvtneps_pbh(v); }
#else
// To the nearest, to the even one of two; what is too small for a normal number is zero, as VCVTNEPS2BF16 has it.
inline __m256i narrow(Lanes v) {
  const __m512i bits = _mm512_castps_si512(v), high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  __m512i out = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 is_tiny = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
  out = _mm512_mask_and_epi32(out, is_tiny, high, _mm512_set1_epi32(0x8000));
  out = _mm512_mask_or_epi32(out, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), high, _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(out);
}
#endif

inline Lanes load16(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
inline Lanes load16(const bf16* p, Mask m) { return widen(_mm256_maskz_loadu_epi16(m, p)); }
inline void store16(bf16* p, Lanes v) { _mm256_storeu_si256((__m256i*)p, narrow(v)); }
inline void store16(bf16* p, Lanes v, Mask m) { _mm256_mask_storeu_epi16(p, m, narrow(v)); }

// Number `n` of each of sixteen words.
inline Lanes numbers(const bf16* words, int n) {
  const __m512i v = _mm512_loadu_si512(words);
  return _mm512_castsi512_ps(n ? _mm512_and_si512(v, _mm512_set1_epi32(0xffff0000)) : _mm512_slli_epi32(v, 16));
}

inline Words load_words(const void* p, Mask m) { return _mm512_maskz_loadu_epi32(m, p); }
inline void store_words(void* p, Words v) { _mm512_storeu_si512(p, v); }

// out[c * stride .. + 16] = word c of the sixteen `r`.
inline void transpose(Words (&r)[16], std::int32_t* out, std::int64_t stride) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[8 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    store_words(out + i * stride, _mm512_shuffle_i32x4(t[i], t[4 + i], 0x88));
    store_words(out + (4 + i) * stride, _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0x88));
    store_words(out + (8 + i) * stride, _mm512_shuffle_i32x4(t[i], t[4 + i], 0xdd));
    store_words(out + (12 + i) * stride, _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0xdd));
  }
}

// (a0 b0 a1 b1 ...) of two rows of 32 numbers of 16 bits: the first and the second sixteen pairs.
inline void interleave(Words a, Words b, void* first, void* second) {
  alignas(64) static constexpr struct Index {
    std::uint16_t first[32], second[32];
    constexpr Index() : first(), second() {
      for (int i = 0; i < 16; ++i) {
        first[2 * i] = i, first[2 * i + 1] = 32 + i;
        second[2 * i] = 16 + i, second[2 * i + 1] = 48 + i;
      }
    }
  } index;
  store_words(first, _mm512_permutex2var_epi16(a, _mm512_load_si512(index.first), b));
  store_words(second, _mm512_permutex2var_epi16(a, _mm512_load_si512(index.second), b));
}

#else

constexpr bool kHas32Registers = false;

struct Lanes {
  __m256 a, b;  // lanes 0 to 7, 8 to 15
};
struct Words {
  __m256i a, b;
};

inline Lanes operator+(Lanes x, Lanes y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Lanes operator-(Lanes x, Lanes y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Lanes operator*(Lanes x, Lanes y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Lanes operator/(Lanes x, Lanes y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }

inline Lanes spread(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
inline Lanes fma(Lanes x, Lanes y, Lanes z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Lanes fnma(Lanes x, Lanes y, Lanes z) {
  return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
inline Lanes max_of(Lanes x, Lanes y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Lanes min_of(Lanes x, Lanes y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }

inline __m256 nearest(__m256 v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Lanes nearest(Lanes v) { return {nearest(v.a), nearest(v.b)}; }

// In two steps: no float32 holds 2^-140. Beyond 250 all is zero or infinite as it is.
inline __m256 times_power(__m256 v, __m256 n) {
  n = _mm256_max_ps(_mm256_set1_ps(-250.f), _mm256_min_ps(_mm256_set1_ps(250.f), n));
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  const auto power = [](__m256i exponent) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
  };
  return _mm256_mul_ps(_mm256_mul_ps(v, power(half)), power(_mm256_sub_epi32(whole, half)));
}
inline Lanes times_power(Lanes v, Lanes n) { return {times_power(v.a, n.a), times_power(v.b, n.b)}; }

inline __m256i lanes_of(unsigned mask) {  // of its low eight bits
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(mask)), bits), bits);
}
inline Lanes select(Mask m, Lanes x, Lanes otherwise) {
  return {_mm256_blendv_ps(otherwise.a, x.a, _mm256_castsi256_ps(lanes_of(m))),
          _mm256_blendv_ps(otherwise.b, x.b, _mm256_castsi256_ps(lanes_of(m >> 8)))};
}
inline Mask equal(Lanes x, Lanes y) {
  return Mask(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ)) |
              _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)) << 8);
}
inline float sum_of(Lanes v) { return sum_of(_mm256_add_ps(v.a, v.b)); }
inline float most_of(Lanes v) { return most_of(_mm256_max_ps(v.a, v.b)); }

inline Lanes load16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Lanes load16(const float* p, Mask m) {
  return {_mm256_maskload_ps(p, lanes_of(m)), _mm256_maskload_ps(p + 8, lanes_of(m >> 8))};
}
inline void store16(float* p, Lanes v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
inline void store16(float* p, Lanes v, Mask m) {
  _mm256_maskstore_ps(p, lanes_of(m), v.a);
  _mm256_maskstore_ps(p + 8, lanes_of(m >> 8), v.b);
}

inline Lanes widen(__m256i v) {
  const auto half = [](__m128i of) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(of), 16)); };
  return {half(_mm256_castsi256_si128(v)), half(_mm256_extracti128_si256(v, 1))};
}

// To the nearest, to the even one of two; what is too small for a normal number is zero, as VCVTNEPS2BF16 has it.
inline __m256i narrow(__m256 v) {  // eight words
  const __m256i bits = _mm256_castps_si256(v), high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  __m256i out = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i exponent = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000));
  const __m256i is_tiny = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
  out = _mm256_blendv_epi8(out, _mm256_and_si256(high, _mm256_set1_epi32(0x8000)), is_tiny);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(out, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), is_nan);
}
inline __m256i narrow(Lanes v) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(narrow(v.a), narrow(v.b)), 0xd8);
}

// Masks of numbers in memory are prefixes: their first lanes are there, the rest is not.
inline std::size_t bytes_of(Mask m) { return __builtin_popcount(m) * sizeof(bf16); }
inline Lanes load16(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
inline Lanes load16(const bf16* p, Mask m) {
  if (m == 0xffff) return load16(p);
  alignas(32) bf16 there[16] = {};
  std::memcpy(there, p, bytes_of(m));
  return load16(there);
}
inline void store16(bf16* p, Lanes v) { _mm256_storeu_si256((__m256i*)p, narrow(v)); }
inline void store16(bf16* p, Lanes v, Mask m) {
  if (m == 0xffff) return store16(p, v);
  alignas(32) bf16 all[16];
  store16(all, v);
  std::memcpy(p, all, bytes_of(m));
}

// Number `n` of each of sixteen words.
inline __m256 numbers(__m256i words, int n) {
  return _mm256_castsi256_ps(n ? _mm256_and_si256(words, _mm256_set1_epi32(0xffff0000)) : _mm256_slli_epi32(words, 16));
}
inline Lanes numbers(const bf16* words, int n) {
  const __m256i* p = (const __m256i*)words;
  return {numbers(_mm256_loadu_si256(p), n), numbers(_mm256_loadu_si256(p + 1), n)};
}

inline Words load_words(const void* p, Mask m) {
  const int* words = (const int*)p;
  return {_mm256_maskload_epi32(words, lanes_of(m)), _mm256_maskload_epi32(words + 8, lanes_of(m >> 8))};
}
inline void store_words(void* p, Words v) {
  _mm256_storeu_si256((__m256i*)p, v.a);
  _mm256_storeu_si256((__m256i*)p + 1, v.b);
}

inline void transpose8(const __m256i (&r)[8], std::int32_t* out, std::int64_t stride) {
  __m256i t[8], u[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    u[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    u[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_si256((__m256i*)(out + i * stride), _mm256_permute2x128_si256(u[i], u[4 + i], 0x20));
    _mm256_storeu_si256((__m256i*)(out + (4 + i) * stride), _mm256_permute2x128_si256(u[i], u[4 + i], 0x31));
  }
}

// out[c * stride .. + 16] = word c of the sixteen `r`.
inline void transpose(Words (&r)[16], std::int32_t* out, std::int64_t stride) {
  for (int i = 0; i < 16; i += 8) {
    __m256i left[8], right[8];
    for (int k = 0; k < 8; ++k) left[k] = r[i + k].a, right[k] = r[i + k].b;
    transpose8(left, out + i, stride);
    transpose8(right, out + 8 * stride + i, stride);
  }
}

inline void interleave(__m256i a, __m256i b, __m256i* out) {
  const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
  _mm256_storeu_si256(out, _mm256_permute2x128_si256(low, high, 0x20));
  _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(low, high, 0x31));
}

// (a0 b0 a1 b1 ...) of two rows of 32 numbers of 16 bits: the first and the second sixteen pairs.
inline void interleave(Words a, Words b, void* first, void* second) {
  interleave(a.a, b.a, (__m256i*)first);
  interleave(a.b, b.b, (__m256i*)second);
}

#endif

inline Lanes zeros() { return spread(0.f); }
inline Lanes numbers(const float* words, int) { return load16(words); }

// To what a number holds and back: where transformers keeps a tensor between two operations.
inline Lanes rounded(Lanes v) {
  if constexpr (sizeof(Num) == 4)
    return v;
  else
    return widen(narrow(v));
}

// exp to about 1 unit in the last place; exactly 0 far below, infinite far above. is_negative: x is never above 0.
template <bool is_negative = false>
inline Lanes exp16(Lanes x) {
  x = max_of(spread(-200.f), is_negative ? x : min_of(spread(200.f), x));
  const Lanes n = nearest(x * spread(1.44269504f));
  Lanes r = fnma(n, spread(0.693359375f), x);
  r = fnma(n, spread(-2.12194440e-4f), r);
  Lanes p = spread(1.9875691500e-4f);
  p = fma(p, r, spread(1.3981999507e-3f));
  p = fma(p, r, spread(8.3334519073e-3f));
  p = fma(p, r, spread(4.1665795894e-2f));
  p = fma(p, r, spread(1.6666665459e-1f));
  p = fma(p, r, spread(5.0000001201e-1f));
  p = fma(p, r * r, r + spread(1.f));
  return times_power(p, n);
}
