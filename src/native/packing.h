// How weights lie in panels of output columns, and how rows are quantised to meet them.
//
// f32: for each input, its columns side by side. bf16: likewise as 32-bit words, column j low and j + panel / 2 high.
// bf16_pairs: for every 2 inputs, both of column 0, both of column 1, ...; a row is rounded to bf16, an odd one padded.
// Quantised types go by blocks of inputs, each a header (for every column its scale, then for q4_1 its minimum:
// fp32 in int8, else fp16 as in the file) and the integers:
//   8 bits: for every 2 inputs, both of column 0, both of column 1, ...
//   4 bits: for every 4 inputs, those of column 0, ... of column panel / 2 - 1; the other half of the columns high.
// A quantised row goes by the same blocks: a RowBlock and the integers, 16 bits wide to meet 8, else 8.
#pragma once
#include "kernels.h"

namespace specinfer {

constexpr int BLOCK = 32;  // inputs that share a scale; in int8 all of them do

// value = integer * scale
struct RowBlock {
  float scale;
  float sum;  // of the values
  // -8 times the sums of the integers 0, 1, 4, 5, ... and 2, 3, 6, 7, ...: what q4_0 starts from
  int16_t minus_eight[2];
  int32_t padding;
};

constexpr bool converts_rows(Type t) { return t >= Type::bf16_pairs; }
constexpr bool is_quantized(Type t) { return t >= Type::int8; }
constexpr bool has_nibbles(Type t) { return t >= Type::q4_0; }

static inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

static inline int64_t block_inputs(Type t, int64_t inputs) { return t == Type::int8 ? round_up(inputs, 8) : BLOCK; }

static inline int64_t num_blocks(Type t, int64_t inputs) {
  const int64_t block = block_inputs(t, inputs);
  return (inputs + block - 1) / block;
}

constexpr int64_t header_bytes(Type t, int panel) { return t == Type::int8 || t == Type::q4_1 ? 4 * panel : 2 * panel; }

static inline int64_t block_bytes(Type t, int64_t inputs, int panel) {
  return header_bytes(t, panel) + block_inputs(t, inputs) * panel / (has_nibbles(t) ? 2 : 1);
}

static inline int64_t panel_bytes(Type t, int64_t inputs, int panel) {
  if (is_quantized(t)) return num_blocks(t, inputs) * block_bytes(t, inputs, panel);
  if (t == Type::bf16_pairs) inputs = round_up(inputs, 2);
  return inputs * panel * (t == Type::f32 ? 4 : 2);
}

static inline int64_t row_block_bytes(Type t, int64_t inputs) {
  return int64_t(sizeof(RowBlock)) + block_inputs(t, inputs) * (has_nibbles(t) ? 1 : 2);
}

// Of a row that was converted, else 0.
static inline int64_t converted_row_bytes(Type t, int64_t inputs) {
  if (!is_quantized(t)) return converts_rows(t) ? 2 * round_up(inputs, 2) : 0;
  return num_blocks(t, inputs) * row_block_bytes(t, inputs);
}

// Element i of an array of f32, bf16 or f16.
float element(const void* data, Type type, int64_t i);

// One output's weights, `inputs` of them, into its column of a panel: from f32, bf16 or f16, or from blocks of the
// linear's own type as GGUF stores them. Throws std::invalid_argument, and std::runtime_error for what is no number.
void pack(const Linear& linear, int panel, int64_t which, int64_t column, const void* from, Type type);

// Back to fp32.
void unpack(const Linear& linear, int panel, int64_t which, int64_t column, float* out);

}  // namespace specinfer
