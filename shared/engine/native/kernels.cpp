// The decoder's arithmetic on x86-64 CPUs, in bfloat16 or float32: one step of a model, fused.
//
// Same function as models/decoder.py with attention/sdpa.py, rounded where transformers rounds. Why it
// is fast, and what it promises:
//
// * Weights lie in panels of 64 columns, word by word of k (a pair of bfloat16, as VDPBF16PS wants them). A tile
//   of up to 6 tokens x 64 columns, or 10 x 32, stays in registers; a panel is read once from memory and then
//   from L2, so a decode step moves each weight once, and prefill runs at the multipliers' speed.
// * Every output element is one chain of multiply-adds over k in one order, whatever the batch;
//   attention walks key tiles of 64 at absolute positions, whatever the chunk. So results are the same
//   bits for any batch size, chunking, number of threads and place in the batch.
// * They are the same bits on every CPU, too, but where AMX multiplies (amx.h). VDPBF16PS multiplies pairs of
//   bfloat16 and adds the odd product, then the even one, flushing what is too small; where a CPU lacks it, numbers
//   are widened and the same is added in the same order (a product of two bfloat16 is exact in float32).
// * Norms, rotary embedding, SiLU and residuals happen on the way; no temporary leaves the caches.
//
// Bindings and docstrings: library.py. Layout of weights: `PackJob`. Nothing here keeps state or
// knows Python, and nothing but `pd_pack` allocates or reads a file.

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __AMX_BF16__
#include "amx.h"
#endif
#include "lanes.h"
#include "team.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// What multiply-adds take: pairs of bfloat16 where the CPU multiplies those, else float32.
#if defined(__AVX512BF16__) && !defined(PD_FLOAT32)
using Operand = bf16;
#else
using Operand = float;
#endif

constexpr int kPanel = 64;      // columns of a weight panel = keys of an attention tile
constexpr int kTile = 6;        // tokens of a register tile of 64 columns
constexpr int kTallTile = kHas32Registers ? 10 : kTile;  // of one of 32, where few tokens wait for weights
constexpr std::int64_t kFewRows = 64;  // that many
constexpr int kLine = 64 / sizeof(Num);  // numbers of a cache line
constexpr int kLinesAWord = 4;  // lines that a word of each column of a panel fills
constexpr int kLinesAhead = 2;  // lines of the next panel a tile asks for beside four that it reads
constexpr int kMaxRows = 192;   // query rows (tokens x heads of a group) that share one walk over keys
constexpr int kMaxHeadDim = 256;
constexpr int kPackRows = 16;    // rows of a matrix that are read and transposed at once
constexpr std::int64_t kPieceBytes = 2 << 20;  // about what of panels one thread fills in one go: a huge page
constexpr int kCheckFailed = 1;
constexpr int kEndsTooSoon = -1;

// --- what Python hands over; mirrored in library.py --------------------------------------------------

struct Linear {
  const Num* panels;  // [ceil(n / 64)][k / word][64][word], a word = 2 bfloat16 or 1 float32
  const Num* bias;    // [n] or null
  std::int64_t n, k;
};

// A matrix [rows][k] to be packed, from memory or, with matrix null, from a file at a position in bytes:
// a few rows at a time stay in L2, which costs less than to map the file page by page, and a file that breaks
// is an error and no signal. Row r becomes column `offset + c % width` of panel `c / width`, where c = first + r:
// width 64 for a plain matrix, 32 for gate (offset 0) and up (32). error: 0, an errno, or kEndsTooSoon.
struct PackJob {
  const Num* matrix;
  std::int64_t file, position, rows, k;
  Num* panels;
  std::int64_t first, width, offset, error;
};

struct Layer {
  const Num *input_norm, *q_norm, *k_norm, *mlp_norm;  // q_norm, k_norm: null if the model has none
  Linear qkv, out, gate_up, down;  // gate_up: panels of 32 gate columns, then the same 32 of up
  Num *keys, *values;             // pools [slots][kv_heads][head_dim]
  std::int64_t window;             // positions a token sees, itself included; 0 = all earlier ones
};

struct Model {
  std::int64_t hidden, mlp, heads, kv_heads, head_dim, vocab, num_layers, block_size, num_blocks, threads;
  double eps, scale;
  const Num *embedding, *norm;
  Linear head;
  const Layer* layers;
};

struct Batch {
  std::int64_t num_rows, num_tokens;
  const std::int32_t* token_ids;  // [num_tokens]
  const std::int32_t* firsts;     // [num_rows + 1]: first token of each row
  const std::int32_t* starts;     // [num_rows]: position of that token in its sequence
  const std::int32_t* tables;     // block tables of all rows, one after the other
  const std::int32_t* table_at;   // [num_rows + 1]: where each row's begins
  const Num *cos, *sin;          // [positions][head_dim]
  Num* x;                        // [num_tokens][hidden]: the residual stream
  Num* scratch;                  // [num_tokens][hidden + qkv + heads * head_dim + mlp]
};

struct Head {
  std::int64_t count;  // hidden states whose logits are wanted
  Num* normed;        // [count][hidden]: scratch
  float* logits;       // [count][vocab]
  std::int64_t* best;  // [count]: the first most likely token of each
};

// --- the register tile -------------------------------------------------------------------------------

// What one multiply-add takes of a word: a pair of bfloat16 at once, or one number after the other. The odd one of a
// pair comes first, as VDPBF16PS adds them.
#if defined(__AVX512BF16__) && !defined(PD_FLOAT32)
using Factors = __m512bh;
constexpr int kSteps = 1;
inline Factors weights_at(const Num* w, int) { return (__m512bh)_mm512_loadu_si512(w); }
inline Factors spread_at(const Operand* a, int) {
  std::int32_t pair;
  std::memcpy(&pair, a, 4);
  return (__m512bh)_mm512_set1_epi32(pair);
}
inline Lanes add_products(Lanes sum, Factors a, Factors b) { return _mm512_dpbf16_ps(sum, a, b); }
#else
using Factors = Lanes;
constexpr int kSteps = kPerWord;
inline Factors weights_at(const Num* w, int step) { return numbers(w, kPerWord - 1 - step); }
inline Factors spread_at(const Operand* a, int step) { return spread(a[kPerWord - 1 - step]); }
inline Lanes add_products(Lanes sum, Factors a, Factors b) { return fma(a, b, sum); }
#endif

constexpr std::int64_t kStretch = 64;  // words of a panel that stay in L1

// Groups of 16 columns that M tokens of a tile have in registers at once.
template <int M>
constexpr int kWide = kHas32Registers ? (M <= kTile ? 4 : 2) : M == 1 ? 4 : M == 2 ? 2 : 1;

// acc[M][64 columns] += a[M][words] . panel, words in ascending order; meanwhile `lines` lines a
// word are asked for from `ahead` on.
// Where registers hold a part of the tile's columns, a stretch of k is walked for each part in turn.
template <int M, int lines = 0>
inline __attribute__((always_inline)) void multiply(
    Lanes (&acc)[M][4], const Operand* a, std::int64_t stride, const Num* panel, std::int64_t words,
    const Num* ahead = nullptr) {
  constexpr int wide = kWide<M>;
  constexpr std::int64_t stretch = wide == 4 ? 1 << 30 : kStretch;
  for (std::int64_t from = 0; from < words; from += stretch) {
    const std::int64_t upto = std::min(words, from + stretch);
    for (int part = 0; part < 4; part += wide) {
      Lanes sums[M][wide];
#pragma GCC unroll 10
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int j = 0; j < wide; ++j) sums[m][j] = acc[m][part + j];
      for (std::int64_t k = from; k < upto; ++k) {
        const Num* w = panel + (k * kPanel + part * 16) * kPerWord;
        if (lines && part == 0)
          for (int i = 0; i < lines; ++i) fetch(ahead + (k * lines + i) * kLine);
        // A part reads every other or every fourth line, which the CPU does not foresee: all parts together ask
        // for the next stretch, in order.
        if (lines == 0 && wide < 4)
          for (int i = 0; i < wide; ++i)
            fetch(panel + (upto * kLinesAWord + part * stretch + (k - from) * wide + i) * kLine);
#pragma GCC unroll 2
        for (int step = 0; step < kSteps; ++step) {
          Factors weights[wide];
#pragma GCC unroll 4
          for (int j = 0; j < wide; ++j) weights[j] = weights_at(w + j * 16 * kPerWord, step);
#pragma GCC unroll 10
          for (int m = 0; m < M; ++m) {
            const Factors v = spread_at(a + m * stride + kPerWord * k, step);
#pragma GCC unroll 4
            for (int j = 0; j < wide; ++j) sums[m][j] = add_products(sums[m][j], v, weights[j]);
          }
        }
      }
#pragma GCC unroll 10
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int j = 0; j < wide; ++j) acc[m][part + j] = sums[m][j];
    }
  }
}

// sums += a[M][words] . panel. Never inlined: beside an `emit` the compiler keeps constants of that in
// registers and the sums of this loop in memory, which a third of a step's products then wait for.
template <int M, int lines = 0>
__attribute__((noinline)) void tile_sums(Lanes (*sums)[4], const Operand* a, std::int64_t stride,
                                         const Num* panel, std::int64_t words,
                                         const Num* ahead = nullptr) {
  Lanes acc[M][4];
#pragma GCC unroll 10
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) acc[m][j] = sums[m][j];
  multiply<M, lines>(acc, a, stride, panel, words, ahead);
#pragma GCC unroll 10
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sums[m][j] = acc[m][j];
}

constexpr std::int64_t kDeep = 1024;  // words of k of a panel that L2 (1 MiB) holds twice, beside their rows

// Up to a tile's rows as `multiply` takes them: widened, where that takes no pairs.
template <class From>
const Operand* operands(const From* a, std::int64_t& stride, std::int64_t rows, std::int64_t words) {
  if constexpr (std::is_same_v<From, Operand>) {
    return a;
  } else {
    static thread_local Operand space[kTallTile][kDeep * kPerWord];
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t i = 0; i < words * kPerWord; i += 16)
        store16(space[row] + i, load16(a + row * stride + i, mask_of(words * kPerWord - i)));
    stride = kDeep * kPerWord;
    return space[0];
  }
}

// Three products, by AMX or without it: tile_product, of a tile's rows with a panel of a matrix, and attention's two, of the
// M query rows of a tile with its keys (score) and of their weights with its values (weigh).
#ifdef __AMX_BF16__
using Registers = AmxRegisters;

constexpr int kQueryRows = kAmxRows;
// Rows of a piece: many rows share what L1 holds of a panel, and few make enough pieces of a narrow matrix.
constexpr std::int64_t kLeastPieceRows = 96, kMostPieceRows = 384;
// So many tokens stay in L2 (2 MiB) while all panels pass; without AMX a panel stays while all tokens do.
constexpr bool kTokensStay = true;
constexpr std::int64_t kNear = 128;  // words of k of a panel that L1 (48 KiB) holds beside what passes through

std::int64_t most_tile_rows(std::int64_t) { return kAmxRows; }

// Words of k that all rows of a piece pass before the next: from L2 the weights come too slowly for AMX.
std::int64_t deep_of(std::int64_t rows) { return rows <= kFewRows ? kDeep : kNear; }

void tile_product(Registers& registers, Lanes (*sums)[4], const Num* a, std::int64_t stride, const Num* panel,
                  std::int64_t words, std::int64_t rows, bool is_first, const Num* ahead) {
  constexpr std::int64_t kBytes = sizeof sums[0];
  stride *= sizeof(Num);
  const std::int64_t whole = words / kAmxWords * kAmxWords;
  if (whole) {
    registers.shape(rows, kAmxWords);
    if (ahead)
      amx_multiply<kLinesAhead>(sums, kBytes, a, stride, panel, whole, is_first, (const char*)ahead);
    else if (words > kNear)
      amx_multiply<kLinesAWord>(sums, kBytes, a, stride, panel, whole, is_first,
                                (const char*)(panel + kStretch * kLinesAWord * kLine));
    else
      amx_multiply(sums, kBytes, a, stride, panel, whole, is_first);
  }
  if (whole < words) {
    registers.shape(rows, words - whole);
    amx_multiply(sums, kBytes, a + whole * kPerWord, stride, panel + whole * kPerWord * kPanel, words - whole,
                 is_first && !whole);
  }
}

template <int M>
void score(Registers& registers, Lanes (*scores)[4], const Num* queries, std::int64_t padded, const Num* keys,
           std::int64_t words) {
  registers.shape(M, kAmxWords);
  amx_multiply(scores, sizeof scores[0], queries, padded * sizeof(Num), keys, words, true);
}

// All keys of the tile whatever is seen, for the zeros of a chunk that is walked or not would turn a sum of -0 into 0.
template <int M>
void weigh(Registers& registers, float* out, std::int64_t padded, const Num* weights, const Num* values, std::int64_t) {
  registers.shape(M, kAmxWords);
  amx_multiply(out, padded * sizeof(float), weights, kPanel * sizeof(Num), values, kPanel / kPerWord, false);
}
#else
struct Registers {};

constexpr int kQueryRows = kTile;
constexpr std::int64_t kLeastPieceRows = 96, kMostPieceRows = 96;
constexpr bool kTokensStay = false;

std::int64_t most_tile_rows(std::int64_t rows) { return rows <= kFewRows ? kTallTile : kTile; }
std::int64_t deep_of(std::int64_t) { return kDeep; }

// A panel is read in order. AMD's CPUs foresee that better than requests can say; Intel's stop at the end of each page
// (bench/engine).
const bool is_told_what_comes = (__builtin_cpu_init(), __builtin_cpu_is("intel"));

template <int M>
void product_of(Lanes (*sums)[4], const Num* a, std::int64_t stride, const Num* panel, std::int64_t words,
                const Num* ahead) {
  const Operand* rows = operands(a, stride, M, words);
  if (ahead)
    tile_sums<M, kLinesAhead>(sums, rows, stride, panel, words, ahead);
  else if (kWide<M> == 4 && is_told_what_comes)
    tile_sums<M, kLinesAWord>(sums, rows, stride, panel, words, panel + kStretch * kLinesAWord * kLine);
  else
    tile_sums<M>(sums, rows, stride, panel, words);
}

template <int... before>  // 0, 1, ...: how many rows less one
constexpr auto products_of(std::integer_sequence<int, before...>) {
  return std::array{&product_of<before + 1>...};
}

void clear(Lanes (*sums)[4], std::int64_t rows) {
  for (std::int64_t m = 0; m < rows; ++m)
    for (int j = 0; j < 4; ++j) sums[m][j] = zeros();
}

void tile_product(Registers&, Lanes (*sums)[4], const Num* a, std::int64_t stride, const Num* panel,
                  std::int64_t words, std::int64_t rows, bool is_first, const Num* ahead) {
  static constexpr auto products = products_of(std::make_integer_sequence<int, kTallTile>());
  if (is_first) clear(sums, rows);
  products[rows - 1](sums, a, stride, panel, words, ahead);
}

template <int M>
void score(Registers&, Lanes (*scores)[4], const Operand* queries, std::int64_t padded, const Num* keys,
           std::int64_t words) {
  clear(scores, M);
  tile_sums<M>(scores, queries, padded, keys, words);
}

template <int M>
inline void weigh(Registers&, float* out, std::int64_t padded, const Operand* weights, const Num* values,
                  std::int64_t words) {
  Lanes acc[M][4];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
    for (int j = 0; j < 4; ++j) acc[m][j] = load16(out + m * padded + 16 * j);
  multiply<M>(acc, weights, kPanel, values, words);
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
    for (int j = 0; j < 4; ++j) store16(out + m * padded + 16 * j, acc[m][j]);
}
#endif

// emit(row, Lanes[4]) for up to kMostPieceRows rows [begin, end) of a . panel. Rows are cut into tiles of about equal size,
// k into stretches of which a cache holds a panel's part while all rows pass.
// next: the panel that this thread will likely want then, or null. Tiles after the first read this one from L2; memory
// would idle meanwhile, so they bring what comes next, half of it each until it is there.
template <class Emit>
void product(const Num* a, std::int64_t stride, const Num* panel, std::int64_t words,
             std::int64_t begin, std::int64_t end, const Num* next, Emit emit) {
  static thread_local Lanes all[kMostPieceRows][4];
  const std::int64_t most = most_tile_rows(end - begin), deep = deep_of(end - begin);
  Registers registers;
  for (std::int64_t from = 0; from < words; from += deep) {
    const std::int64_t count = std::min(deep, words - from);
    const Num* weights = panel + from * kPerWord * kPanel;
    const bool is_last = from + count == words;
    const Num* coming = is_last ? next : weights + count * kPerWord * kPanel;
    const std::int64_t wanted = std::min(deep, is_last ? words : words - from - count);
    const Num* const coming_end = coming ? coming + wanted * kLinesAWord * kLine : nullptr;
    std::int64_t left = (end - begin + most - 1) / most;
    for (std::int64_t row = begin; row < end; --left) {
      const std::int64_t size = (end - row + left - 1) / left;
      const Num* rows = a + row * stride + from * kPerWord;
      const Num* ahead = row > begin && coming < coming_end ? coming : nullptr;
      Lanes (*sums)[4] = all + (row - begin);
      tile_product(registers, sums, rows, stride, weights, count, size, from == 0, ahead);
      if (ahead) coming += count * kLinesAhead * kLine;
      if (is_last)
        for (std::int64_t m = 0; m < size; ++m) emit(row + m, sums[m]);
      row += size;
    }
  }
}

// --- matrices ---------------------------------------------------------------------------------------

// out = a . weights; emit(row, panel, Lanes[4]).
template <class Emit>
void linear(Team& team, const Linear& lin, const Num* a, std::int64_t num_tokens, Emit emit) {
  const std::int64_t panels = (lin.n + kPanel - 1) / kPanel;
  const auto cuts_of = [&](std::int64_t rows) { return (num_tokens + rows - 1) / rows; };
  const std::int64_t wanted = (4 * team.size + panels - 1) / panels;  // four pieces a thread
  const std::int64_t cuts = std::clamp(wanted, cuts_of(kMostPieceRows), cuts_of(kLeastPieceRows));
  const auto panel_of = [&](std::int64_t piece) { return kTokensStay ? piece % panels : piece / cuts; };
  team.run(panels * cuts, [&](std::int64_t piece) {
    const std::int64_t panel = panel_of(piece), cut = kTokensStay ? piece / panels : piece % cuts;
    const std::int64_t begin = num_tokens * cut / cuts, end = num_tokens * (cut + 1) / cuts;
    const Num* weights = lin.panels + panel * lin.k * kPanel;
    const auto emit_row = [&](std::int64_t row, Lanes (&acc)[4]) { emit(row, panel, acc); };
    const std::int64_t after = piece + team.size;  // this thread's next piece, likely
    const std::int64_t then = after < panels * cuts ? panel_of(after) : panel;
    const Num* next = then != panel ? lin.panels + then * lin.k * kPanel : nullptr;
    product(a, lin.k, weights, lin.k / kPerWord, begin, end, next, emit_row);
  });
}

inline void add_bias(const Linear& lin, std::int64_t panel, Lanes (&acc)[4]) {
  if (!lin.bias) return;
  for (int j = 0; j < 4; ++j) {
    std::int64_t column = panel * kPanel + 16 * j;
    acc[j] = acc[j] + load16(lin.bias + column, mask_of(lin.n - column));
  }
}

inline void store_panel(const Linear& lin, std::int64_t panel, const Lanes (&acc)[4], Num* out) {
  for (int j = 0; j < 4; ++j) {
    std::int64_t column = panel * kPanel + 16 * j;
    store16(out + column, acc[j], mask_of(lin.n - column));
  }
}

// x[row] += a . weights, rounded twice as transformers does: the product, then the sum.
void linear_residual(Team& team, const Linear& lin, const Num* a, std::int64_t num_tokens, Num* x) {
  linear(team, lin, a, num_tokens, [&](std::int64_t row, std::int64_t panel, Lanes (&acc)[4]) {
    add_bias(lin, panel, acc);
    Num* to = x + row * lin.n;
    for (int j = 0; j < 4; ++j) {
      std::int64_t column = panel * kPanel + 16 * j;
      Mask m = mask_of(lin.n - column);
      store16(to + column, load16(to + column, m) + rounded(acc[j]), m);
    }
  });
}

// --- row-wise operations -----------------------------------------------------------------------------

void rms_norm(const Num* in, const Num* weight, std::int64_t size, float eps, Num* out) {
  Lanes sum = zeros();
  for (std::int64_t i = 0; i < size; i += 16) {
    Lanes v = load16(in + i, mask_of(size - i));
    sum = fma(v, v, sum);
  }
  const float mean = sum_of(sum) / float(size);
  const Lanes factor = spread(1.f / std::sqrt(mean + eps));
  for (std::int64_t i = 0; i < size; i += 16) {
    Mask m = mask_of(size - i);
    Lanes v = rounded(load16(in + i, m) * factor);
    store16(out + i, v * load16(weight + i, m), m);
  }
}

void norm_rows(Team& team, const Model& model, const Num* in, const Num* weight, std::int64_t num_tokens,
               Num* out) {
  constexpr std::int64_t kStep = 8;
  team.run((num_tokens + kStep - 1) / kStep, [&](std::int64_t piece) {
    for (std::int64_t t = piece * kStep; t < std::min(num_tokens, (piece + 1) * kStep); ++t)
      rms_norm(in + t * model.hidden, weight, model.hidden, float(model.eps), out + t * model.hidden);
  });
}

// Rotary embedding in place; pairs are (i, i + half), each product and the sum are rounded.
void rotate(Num* head, const Num* cos, const Num* sin, std::int64_t dim) {
  const std::int64_t half = dim / 2;
  for (std::int64_t i = 0; i < half; i += 16) {
    Mask m = mask_of(half - i);
    Lanes a = load16(head + i, m), b = load16(head + half + i, m);
    Lanes low = rounded(a * load16(cos + i, m)) - rounded(b * load16(sin + i, m));
    Lanes high = rounded(b * load16(cos + half + i, m)) + rounded(a * load16(sin + half + i, m));
    store16(head + i, low, m);
    store16(head + half + i, high, m);
  }
}

// --- attention ---------------------------------------------------------------------------------------

// A head's keys and values of a tile, as `multiply` takes them.
struct alignas(64) Panels {
  Num keys[kMaxHeadDim * kPanel];    // [dim / word][64 keys][word]
  Num values[kMaxHeadDim * kPanel];  // [dim / 64][64 / word keys][64 columns][word]
};

// What one thread needs for one group of query rows.
struct alignas(64) Workspace {
  Operand queries[kMaxRows * kMaxHeadDim];
  Panels panels[2];
  float out[kMaxRows * kMaxHeadDim];
  float top[kMaxRows];
  alignas(64) float sum[kMaxRows][16];  // by lane: added up once, at the end
};

struct Sequence {
  const Model& model;
  const Layer& layer;
  const std::int32_t* table;

  // Where a position's keys (and values) begin in the pools: those of the first head.
  std::int64_t offset(std::int64_t position) const {
    const std::int64_t slot = std::int64_t(table[position / model.block_size]) * model.block_size +
                              position % model.block_size;
    return slot * model.kv_heads * model.head_dim;
  }
};

// Where the keys and values of up to 64 neighbouring positions lie.
struct Tile {
  std::int64_t count = 0;
  const Num *keys[kPanel], *values[kPanel];

  // Find positions [first, min(first + 64, stop)), with one division a block. The rest of the places
  // point to something that exists, for `lay_out` prefetches them.
  void find(const Sequence& seq, std::int64_t first, std::int64_t stop) {
    const Model& model = seq.model;
    const std::int64_t stride = model.kv_heads * model.head_dim;
    count = std::max<std::int64_t>(0, std::min<std::int64_t>(kPanel, stop - first));
    for (std::int64_t i = 0; i < count;) {
      std::int64_t at = seq.offset(first + i);
      const std::int64_t left = model.block_size - (first + i) % model.block_size;
      for (const std::int64_t end = std::min(count, i + left); i < end; ++i, at += stride) {
        keys[i] = seq.layer.keys + at;
        values[i] = seq.layer.values + at;
      }
    }
    std::fill(keys + count, keys + kPanel, seq.layer.keys);
    std::fill(values + count, values + kPanel, seq.layer.values);
  }
};

// Lay a head's keys and values of a tile out for `multiply`; the rest of the tile becomes zero. The
// same head's part of the next tile is asked for on the way, a line for each that is read: blocks lie
// anywhere and one head's parts of two tokens are far apart, so the hardware cannot guess, and all
// requests at once would be more than a core can have under way.
void lay_out(const Model& model, const Tile& tile, const Tile& next, std::int64_t kv_head, Panels& space) {
  const std::int64_t dim = model.head_dim, at = kv_head * dim, count = tile.count;
  const std::int64_t panels = (dim + kPanel - 1) / kPanel;
  for (std::int64_t group = 0; group < kPanel; group += 16) {
    for (std::int64_t d = 0; d < dim; d += 16 * kPerWord) {
      Words rows[16];
      const Mask m = mask_of((dim - d) / kPerWord);
      for (int i = 0; i < 16; ++i) {
        fetch(next.keys[group + i] + at + d);
        rows[i] = load_words(tile.keys[group + i] + at + d, group + i < count ? m : 0);
      }
      transpose(rows, (std::int32_t*)space.keys + (d / kPerWord) * kPanel + group, kPanel);
    }
  }
  for (std::int64_t key = 0; key < kPanel; key += kPerWord) {
    for (std::int64_t d = 0; d < panels * kPanel; d += 16 * kPerWord) {
      const Mask m = mask_of((dim - d) / kPerWord);
      Num* to = space.values + ((d / kPanel) * kPanel + key) * kPanel + (d % kPanel) * kPerWord;
      fetch(next.values[key] + at + d);
      const Words a = load_words(tile.values[key] + at + d, key < count ? m : 0);
      if constexpr (kPerWord == 1) {
        store_words(to, a);
      } else {
        fetch(next.values[key + 1] + at + d);
        interleave(a, load_words(tile.values[key + 1] + at + d, key + 1 < count ? m : 0), to, to + 32);
      }
    }
  }
}

// Keep numbers as what multiply-adds take.
inline void keep(Operand* to, Lanes v) {
  if constexpr (sizeof(Operand) == sizeof(Num))
    store16(to, v);
  else
    store16(to, rounded(v));
}

// M query rows against one tile: scores, running softmax (Milakov and Gimelshein 2018), weighted values.
// visible[m]: keys [from, to) of the tile that row m sees.
template <int M>
void attend_tile(Registers& registers, const Model& model, Workspace& space, const Panels& kv, std::int64_t row,
                 const std::int32_t (*visible)[2]) {
  const std::int64_t dim = model.head_dim, panels = (dim + kPanel - 1) / kPanel, padded = panels * kPanel;
  alignas(64) Operand weights[M][kPanel];
  Lanes scores[M][4];
  score<M>(registers, scores, space.queries + row * padded, padded, kv.keys, dim / kPerWord);
  const Lanes scale = spread(float(model.scale)), never = spread(-INFINITY);
  float before[M];
#pragma GCC unroll 1
  for (int m = 0; m < M; ++m) {
    const std::int32_t from = visible[m][0], to = visible[m][1];
    const bool is_whole = from == 0 && to == kPanel;
    Lanes top = never;
    for (int j = 0; j < 4; ++j) {
      scores[m][j] = scores[m][j] * scale;
      if (!is_whole)
        scores[m][j] = select(mask_of(to - 16 * j) & ~mask_of(from - 16 * j), scores[m][j], never);
      top = max_of(top, scores[m][j]);
    }
    before[m] = space.top[row + m];
    space.top[row + m] = std::max(before[m], most_of(top));
  }
  for (int m = 0; m < M; ++m) {
    const float now = space.top[row + m];
    if (now == before[m]) continue;
    const Lanes factor = spread(std::exp(before[m] - now));
    store16(space.sum[row + m], load16(space.sum[row + m]) * factor);
    float* out = space.out + (row + m) * padded;
    for (std::int64_t d = 0; d < padded; d += 16) store16(out + d, load16(out + d) * factor);
  }
#pragma GCC unroll 1
  for (int m = 0; m < M; ++m) {
    if (visible[m][0] >= visible[m][1]) {  // nothing of this tile is seen: leave the row as it is
      std::memset(weights[m], 0, sizeof weights[m]);
      continue;
    }
    const Lanes shift = spread(space.top[row + m]);
    Lanes sum = load16(space.sum[row + m]);
    for (int j = 0; j < 4; ++j) {
      Lanes weight = exp16<true>(scores[m][j] - shift);
      sum = sum + weight;
      keep(weights[m] + 16 * j, weight);
    }
    store16(space.sum[row + m], sum);
  }
  std::int32_t seen = 0;  // keys of the tile that any of the rows sees: the others weigh nothing
  for (int m = 0; m < M; ++m) seen = std::max(seen, visible[m][1]);
  for (std::int64_t panel = 0; panel < panels; ++panel)
    weigh<M>(registers, space.out + row * padded + panel * kPanel, padded, weights[0],
             kv.values + panel * kPanel * kPanel, (seen + kPerWord - 1) / kPerWord);
}

template <int... before>
constexpr auto attend_tiles_of(std::integer_sequence<int, before...>) {
  return std::array{&attend_tile<before + 1>...};
}

// Key/value heads [head, head + heads) for tokens [begin, end) of one row of the batch.
void attend(const Model& model, const Layer& layer, const Batch& batch, std::int64_t row, std::int64_t head,
            std::int64_t heads, std::int64_t begin, std::int64_t end, const Num* qkv, Num* mixed) {
  static thread_local Workspace space;
  static constexpr auto attend_tiles = attend_tiles_of(std::make_integer_sequence<int, kQueryRows>());
  const std::int64_t dim = model.head_dim, padded = (dim + kPanel - 1) / kPanel * kPanel;
  const std::int64_t group = model.heads / model.kv_heads;
  const std::int64_t width = (model.heads + 2 * model.kv_heads) * dim;
  // Query rows: key/value head by head, in it token by token, in it the heads of the group.
  const std::int64_t of_head = (end - begin) * group, num_rows = of_head * heads;
  const auto place = [&](std::int64_t r) { return (head + r / of_head) * group + r % group; };
  for (std::int64_t r = 0; r < num_rows; ++r) {
    const Num* query = qkv + (begin + r % of_head / group) * width + place(r) * dim;
    for (std::int64_t d = 0; d < padded; d += 16)
      store16(space.queries + r * padded + d, load16(query + d, mask_of(dim - d)));
    space.top[r] = -INFINITY;
    store16(space.sum[r], zeros());
  }
  std::memset(space.out, 0, num_rows * padded * sizeof(float));
  const Sequence seq{model, layer, batch.tables + batch.table_at[row]};
  const std::int64_t position = batch.starts[row] + begin - batch.firsts[row];  // of token `begin`
  const std::int64_t last = position + (end - begin) - 1;
  const std::int64_t oldest = layer.window ? std::max<std::int64_t>(0, position - layer.window + 1) : 0;
  // One step is a head of a tile. The panels of the next are laid out before those of this one are multiplied: what is
  // stored just before it is read is waited for.
  const std::int64_t begin_at = oldest / kPanel * kPanel, num_steps = ((last - begin_at) / kPanel + 1) * heads;
  Registers registers;
  Tile tiles[3];
  const auto find = [&](std::int64_t n) { tiles[n % 3].find(seq, begin_at + n * kPanel, last + 1); };
  const auto lay = [&](std::int64_t step) {
    const std::int64_t n = step / heads;
    if (step % heads == 0) find(n + 1);
    lay_out(model, tiles[n % 3], tiles[(n + 1) % 3], head + step % heads, space.panels[step % 2]);
  };
  find(0);
  lay(0);
  for (std::int64_t step = 0; step < num_steps; ++step) {
    if (step + 1 < num_steps) lay(step + 1);
    const std::int64_t first = begin_at + step / heads * kPanel, h = step % heads;
    for (std::int64_t r = 0, left = (of_head + kQueryRows - 1) / kQueryRows; r < of_head; --left) {
      const std::int64_t size = (of_head - r + left - 1) / left;
      std::int32_t visible[kQueryRows][2];
      bool is_seen = false;
      for (std::int64_t m = 0; m < size; ++m) {
        const std::int64_t at = position + (r + m) / group;
        visible[m][0] = layer.window ? std::max<std::int64_t>(0, at - layer.window + 1 - first) : 0;
        visible[m][1] = std::min<std::int64_t>(kPanel, at + 1 - first);
        is_seen |= visible[m][0] < visible[m][1];
      }
      if (is_seen)
        attend_tiles[size - 1](registers, model, space, space.panels[step % 2], h * of_head + r, visible);
      r += size;
    }
  }
  for (std::int64_t r = 0; r < num_rows; ++r) {
    Num* to = mixed + (begin + r % of_head / group) * model.heads * dim + place(r) * dim;
    const Lanes inverse = spread(1.f / sum_of(load16(space.sum[r])));
    for (std::int64_t d = 0; d < dim; d += 16)
      store16(to + d, load16(space.out + r * padded + d) * inverse, mask_of(dim - d));
  }
}

// --- a layer -----------------------------------------------------------------------------------------

struct Buffers {
  Num *normed, *qkv, *mixed, *act;
  Buffers(const Model& model, const Batch& batch) {
    normed = batch.scratch;
    qkv = normed + batch.num_tokens * model.hidden;
    mixed = qkv + batch.num_tokens * (model.heads + 2 * model.kv_heads) * model.head_dim;
    act = mixed + batch.num_tokens * model.heads * model.head_dim;
  }
};

// Norm, q, k, v, rotary embedding, and the KV of this step's tokens into the pool.
void first_half(Team& team, const Model& model, const Layer& layer, const Batch& batch, const Buffers& to) {
  norm_rows(team, model, batch.x, layer.input_norm, batch.num_tokens, to.normed);
  const std::int64_t dim = model.head_dim, kv_width = model.kv_heads * dim;
  const std::int64_t width = model.heads * dim + 2 * kv_width;
  linear(team, layer.qkv, to.normed, batch.num_tokens, [&](std::int64_t row, std::int64_t panel, Lanes (&acc)[4]) {
    add_bias(layer.qkv, panel, acc);
    store_panel(layer.qkv, panel, acc, to.qkv + row * width);
  });
  constexpr std::int64_t kStep = 8;
  team.run((batch.num_tokens + kStep - 1) / kStep, [&](std::int64_t piece) {
    const std::int64_t begin = piece * kStep, end = std::min(batch.num_tokens, begin + kStep);
    std::int64_t row = std::upper_bound(batch.firsts, batch.firsts + batch.num_rows, begin) - batch.firsts - 1;
    for (std::int64_t t = begin; t < end; ++t) {
      if (t == batch.firsts[row + 1]) ++row;
      const std::int64_t position = batch.starts[row] + t - batch.firsts[row];
      const Num *cos = batch.cos + position * dim, *sin = batch.sin + position * dim;
      Num* heads = to.qkv + t * width;
      for (std::int64_t h = 0; h < model.heads + model.kv_heads; ++h) {
        const Num* norm = h < model.heads ? layer.q_norm : layer.k_norm;
        if (norm) rms_norm(heads + h * dim, norm, dim, float(model.eps), heads + h * dim);
        rotate(heads + h * dim, cos, sin, dim);
      }
      const std::int64_t at =
          Sequence{model, layer, batch.tables + batch.table_at[row]}.offset(position);
      std::memcpy(layer.keys + at, heads + model.heads * dim, kv_width * sizeof(Num));
      std::memcpy(layer.values + at, heads + model.heads * dim + kv_width, kv_width * sizeof(Num));
    }
  });
}

// Attention, output projection, norm and the gated feed-forward.
void second_half(Team& team, const Model& model, const Layer& layer, const Batch& batch, const Buffers& to) {
  const std::int64_t group = model.heads / model.kv_heads;
  // A piece is a span of a row's tokens and some of its key/value heads: for prompts many tokens share
  // a walk over one head's keys; for single tokens heads share it, since they lie side by side.
  const bool all_single = batch.num_rows == batch.num_tokens;
  const std::int64_t span = all_single ? 1 : std::max<std::int64_t>(1, kMaxRows / group);
  std::int64_t heads = 1;
  if (all_single) {
    heads = std::min(model.kv_heads, kMaxRows / group);
    // Four pieces a thread or more, so that one thread that is held up delays little; then equal parts.
    while (heads % 2 == 0 && batch.num_rows * model.kv_heads / heads < 4 * model.threads) heads /= 2;
    while (model.kv_heads % heads) --heads;
  }
  const std::int64_t parts = model.kv_heads / heads;
  std::int64_t spans = 0;
  for (std::int64_t row = 0; row < batch.num_rows; ++row)
    spans += (batch.firsts[row + 1] - batch.firsts[row] + span - 1) / span;
  team.run(spans * parts, [&](std::int64_t piece) {
    // Later tokens see more keys: they go first, so that the last pieces are small.
    std::int64_t at = spans - 1 - piece / parts, row = 0, begin = 0;
    if (all_single) {
      row = begin = at;
    } else {
      for (std::int64_t count;; ++row, at -= count) {
        count = (batch.firsts[row + 1] - batch.firsts[row] + span - 1) / span;
        if (at < count) break;
      }
      begin = batch.firsts[row] + at * span;
    }
    const std::int64_t end = std::min<std::int64_t>(begin + span, batch.firsts[row + 1]);
    attend(model, layer, batch, row, piece % parts * heads, heads, begin, end, to.qkv, to.mixed);
  });
  linear_residual(team, layer.out, to.mixed, batch.num_tokens, batch.x);
  norm_rows(team, model, batch.x, layer.mlp_norm, batch.num_tokens, to.normed);
  linear(team, layer.gate_up, to.normed, batch.num_tokens,
         [&](std::int64_t row, std::int64_t panel, Lanes (&acc)[4]) {
           add_bias(layer.gate_up, panel, acc);
           for (int j = 0; j < 2; ++j) {
             const std::int64_t column = panel * (kPanel / 2) + 16 * j;
             Lanes gate = rounded(acc[j]), up = rounded(acc[2 + j]);
             Lanes silu = rounded(gate / (spread(1.f) + exp16(zeros() - gate)));
             store16(to.act + row * model.mlp + column, silu * up, mask_of(model.mlp - column));
           }
         });
  linear_residual(team, layer.down, to.act, batch.num_tokens, batch.x);
}

void embed(const Model& model, const Batch& batch) {
  for (std::int64_t t = 0; t < batch.num_tokens; ++t)
    std::memcpy(batch.x + t * model.hidden, model.embedding + batch.token_ids[t] * model.hidden,
                model.hidden * sizeof(Num));
}

// --- loading -----------------------------------------------------------------------------------------

std::int64_t read_all(const PackJob& job, std::int64_t position, Num* to, std::int64_t num_bytes) {
  for (std::int64_t done = 0; done < num_bytes;) {
    const ssize_t count = pread(int(job.file), (char*)to + done, std::size_t(num_bytes - done), position + done);
    if (count == 0) return kEndsTooSoon;
    if (count < 0 && errno != EINTR) return errno;
    if (count > 0) done += count;
  }
  return 0;
}

// Up to 16 rows, the first of which becomes `column`; see PackJob.
void pack_rows(const Num* rows, std::int64_t column, std::int64_t count, std::int64_t k, Num* panels,
               std::int64_t width, std::int64_t offset) {
  std::int64_t done = 0;
  if (count == kPackRows && column % kPackRows == 0) {
    Num* to = panels + (column / width) * k * kPanel + (offset + column % width) * kPerWord;
    for (; done + 16 * kPerWord <= k; done += 16 * kPerWord) {
      Words block[kPackRows];
      for (int i = 0; i < kPackRows; ++i) block[i] = load_words(rows + i * k + done, 0xffff);
      transpose(block, (std::int32_t*)(to + done * kPanel), kPanel);
    }
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t c = column + i;
    Num* to = panels + (c / width) * k * kPanel + (offset + c % width) * kPerWord;
    for (std::int64_t d = done; d < k; ++d) to[d / kPerWord * kPerWord * kPanel + d % kPerWord] = rows[i * k + d];
  }
}

void pack_piece(PackJob& job, std::int64_t begin, std::int64_t rows) {
  std::vector<Num> read(job.matrix ? 0 : kPackRows * job.k);
  for (std::int64_t row = begin; row < begin + rows; row += kPackRows) {
    const std::int64_t count = std::min<std::int64_t>(kPackRows, begin + rows - row);
    const Num* from = job.matrix ? job.matrix + row * job.k : read.data();
    if (!job.matrix) {
      const std::int64_t row_bytes = job.k * std::int64_t(sizeof(Num));
      const auto error = read_all(job, job.position + row * row_bytes, read.data(), count * row_bytes);
      if (error) {
        __atomic_store_n(&job.error, error, __ATOMIC_RELAXED);  // any thread's will do
        return;
      }
    }
    pack_rows(from, job.first + row, count, job.k, job.panels, job.width, job.offset);
  }
}

}  // namespace

// --- the entries -------------------------------------------------------------------------------------

// Whether what is computed with is granted to this process: 0, or an errno.
EXPORT int pd_prepare() {
#ifdef __AMX_BF16__
  return grant_tiles();
#else
  return 0;
#endif
}

EXPORT std::int64_t pd_max_head_dim() { return kMaxHeadDim; }
EXPORT std::int64_t pd_max_group() { return kMaxRows; }

// Whether all token ids, blocks and lengths of the batch exist; 0 = yes.
EXPORT int pd_check(const Model* model, const Batch* batch) {
  for (std::int64_t t = 0; t < batch->num_tokens; ++t)
    if (batch->token_ids[t] < 0 || batch->token_ids[t] >= model->vocab) return kCheckFailed;
  for (std::int64_t row = 0; row < batch->num_rows; ++row) {
    const std::int64_t stop = batch->starts[row] + batch->firsts[row + 1] - batch->firsts[row];
    const std::int64_t blocks = (stop + model->block_size - 1) / model->block_size;
    if (batch->starts[row] < 0 || blocks > batch->table_at[row + 1] - batch->table_at[row]) return kCheckFailed;
    for (std::int64_t i = 0; i < blocks; ++i) {
      const std::int32_t block = batch->tables[batch->table_at[row] + i];
      if (block < 0 || block >= model->num_blocks) return kCheckFailed;
    }
  }
  return 0;
}

EXPORT void pd_embed(const Model* model, const Batch* batch) { embed(*model, *batch); }

EXPORT void pd_first_half(const Model* model, const Batch* batch, std::int64_t layer) {
  const TinyIsZero meanwhile;
  first_half(Team::of_this_thread(model->threads), *model, model->layers[layer], *batch, Buffers(*model, *batch));
}

EXPORT void pd_second_half(const Model* model, const Batch* batch, std::int64_t layer) {
  const TinyIsZero meanwhile;
  second_half(Team::of_this_thread(model->threads), *model, model->layers[layer], *batch, Buffers(*model, *batch));
}

// All layers in one go, where nobody waits for a layer's KV.
EXPORT void pd_forward(const Model* model, const Batch* batch) {
  embed(*model, *batch);
  for (std::int64_t layer = 0; layer < model->num_layers; ++layer) {
    pd_first_half(model, batch, layer);
    pd_second_half(model, batch, layer);
  }
}

void find_best(const Head& of, std::int64_t row, std::int64_t n) {
  const float* logits = of.logits + row * n;
  Lanes top = spread(-INFINITY);
  for (std::int64_t i = 0; i < n; i += 16) {
    Mask m = mask_of(n - i);
    top = select(m, max_of(top, load16(logits + i, m)), top);
  }
  const Lanes highest = spread(most_of(top));
  of.best[row] = 0;
  for (std::int64_t i = 0; i < n; i += 16) {
    Mask m = mask_of(n - i);
    const Mask hit = m & equal(load16(logits + i, m), highest);
    if (hit) {
      of.best[row] = i + __builtin_ctz(hit);
      break;
    }
  }
}

// Logits of hidden states [count][hidden], rounded to Num as transformers does.
EXPORT void pd_logits(const Model* model, const Num* hidden, const Head* to) {
  const TinyIsZero meanwhile;
  Team& team = Team::of_this_thread(model->threads);
  const Linear& head = model->head;
  norm_rows(team, *model, hidden, model->norm, to->count, to->normed);
  linear(team, head, to->normed, to->count, [&](std::int64_t row, std::int64_t panel, Lanes (&acc)[4]) {
    add_bias(head, panel, acc);
    for (int j = 0; j < 4; ++j) {
      const std::int64_t column = panel * kPanel + 16 * j;
      store16(to->logits + row * head.n + column, rounded(acc[j]), mask_of(head.n - column));
    }
  });
  team.run(to->count, [&](std::int64_t row) { find_best(*to, row, head.n); });
}

// Leave each row of logits the tokens that it may choose, and find the best anew. allowed: [count], a
// bit a token and 16 a word, or null = all.
EXPORT void pd_deny(const Model* model, const Head* of, const std::uint16_t* const* allowed) {
  const TinyIsZero meanwhile;
  const std::int64_t n = model->head.n;
  const Lanes never = spread(-INFINITY);
  Team::of_this_thread(model->threads).run(of->count, [&](std::int64_t row) {
    for (std::int64_t i = 0; allowed[row] && i < n; i += 16) {
      const Mask denied = mask_of(n - i) & Mask(~allowed[row][i / 16]);
      store16(of->logits + row * n + i, never, denied);
    }
    find_best(*of, row, n);
  });
}

// out [count][n] = in [count][k] . weights: one matrix alone, for measurements and tests.
EXPORT void pd_linear(const Linear* weights, const Num* in, std::int64_t count, Num* out, std::int64_t threads) {
  const TinyIsZero meanwhile;
  Team& team = Team::of_this_thread(threads);
  linear(team, *weights, in, count, [&](std::int64_t row, std::int64_t panel, Lanes (&acc)[4]) {
    add_bias(*weights, panel, acc);
    store_panel(*weights, panel, acc, out + row * weights->n);
  });
}

// Put matrices into panels. All threads take pieces of all of them, of about a huge page: two that wrote
// into one page at once would both clear it, and with a wait at each matrix every one would wait for the slower
// thread (a virtual machine's host may stall either for milliseconds when it gives memory; bench/startup).
EXPORT void pd_pack(PackJob* jobs, std::int64_t count, std::int64_t threads) {
  struct Piece {
    PackJob* job;
    std::int64_t begin, rows;
  };
  std::vector<Piece> pieces;
  for (PackJob* job = jobs; job < jobs + count; ++job) {
    const std::int64_t panel_bytes = job->k * kPanel * std::int64_t(sizeof(Num));
    const std::int64_t rows = std::max<std::int64_t>(1, kPieceBytes / panel_bytes) * job->width;
    for (std::int64_t begin = 0; begin < job->rows; begin += rows)
      pieces.push_back({job, begin, std::min(rows, job->rows - begin)});
  }
  Team::of_this_thread(threads).run(std::int64_t(pieces.size()), [&](std::int64_t i) {
    pack_piece(*pieces[i].job, pieces[i].begin, pieces[i].rows);
  });
}
