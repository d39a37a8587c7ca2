// How weights lie in panels of output columns, and how rows are quantised to meet them.
//
// f32: for each input, its columns side by side. bf16: likewise as 32-bit words, column j low and j + panel / 2 high.
// bf16_pairs: for every 2 inputs, both of column 0, both of column 1, ...; a row is rounded to bf16, an odd one padded.
// Quantised types go by GGUF's units, each with one or two fp16 numbers for every column as in the file (a scale; in
// q4_1 then a minimum, in q4_k what its minima are multiples of) and its blocks of inputs that share a scale. A block:
// in q4_k and q6_k every column's scale as a multiple of the unit's, in q4_k then its minimum likewise, a byte each,
// and the integers:
//   8 bits, as q6_k's lie, too: for every 2 inputs, both of column 0, both of column 1, ...
//   quads: for every 4 inputs, those of column 0, of column 1, ...; 128 more than what they stand for.
//   4 bits: for every 4 inputs, those of column 0, ... of column panel / 2 - 1; the other half of the columns high.
// A quantised row goes by the same blocks: a RowBlock and the integers, 16 bits wide to meet pairs of 8, else 8.
#pragma once
#include "kernels.h"

namespace specinfer {

// value = integer * scale
struct RowBlock {
  float scale;
  float sum;  // of the values
  // -8 times the sums of the integers 0, 1, 4, 5, ... and 2, 3, 6, 7, ...: what q4_0 starts from; quads from 16 times that
  int16_t minus_eight[2];
  int32_t padding;
};

constexpr bool converts_rows(Type t) { return t >= Type::bf16_pairs; }
constexpr bool is_quantized(Type t) { return t >= Type::q8_0; }
constexpr bool has_nibbles(Type t) { return t == Type::q4_0 || t == Type::q4_1 || t == Type::q4_k; }
constexpr bool has_quads(Type t) { return t == Type::q8_quads || t == Type::q6_quads; }

// As a file has it.
constexpr Type stored_type(Type t) { return t == Type::q8_quads ? Type::q8_0 : t == Type::q6_quads ? Type::q6_k : t; }

static inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

constexpr int unit_inputs(Type t) { return t >= Type::q4_k ? 256 : 32; }
constexpr int block_inputs(Type t) { return t >= Type::q6_k ? 16 : 32; }

// Of a unit, in fp16, and of a block, in a byte.
constexpr int unit_numbers(Type t) { return t == Type::q4_1 || t == Type::q4_k ? 2 : 1; }
constexpr int block_numbers(Type t) { return t == Type::q4_k ? 2 : t >= Type::q6_k ? 1 : 0; }

constexpr int64_t block_bytes(Type t, int panel) {
  return (block_numbers(t) + block_inputs(t) / (has_nibbles(t) ? 2 : 1)) * panel;
}

constexpr int64_t unit_bytes(Type t, int panel) {
  return 2 * unit_numbers(t) * panel + unit_inputs(t) / block_inputs(t) * block_bytes(t, panel);
}

constexpr int64_t panel_bytes(Type t, int64_t inputs, int panel) {
  if (is_quantized(t)) return inputs / unit_inputs(t) * unit_bytes(t, panel);
  if (t == Type::bf16_pairs) inputs = (inputs + 1) / 2 * 2;
  return inputs * panel * (t == Type::f32 ? 4 : 2);
}

constexpr int64_t row_block_bytes(Type t) {
  return int64_t(sizeof(RowBlock)) + block_inputs(t) * (has_nibbles(t) || has_quads(t) ? 1 : 2);
}

// Of a row that was converted, else 0.
constexpr int64_t converted_row_bytes(Type t, int64_t inputs) {
  if (!is_quantized(t)) return converts_rows(t) ? (inputs + 1) / 2 * 4 : 0;
  return inputs / block_inputs(t) * row_block_bytes(t);
}

inline int64_t row_bytes(const Linear& l) { return converted_row_bytes(l.type, l.inputs); }

// A quantised output's weights as GGUF stores them.
constexpr int64_t stored_bytes(Type t, int64_t inputs) {
  const int unit = t == Type::q8_0 ? 34 : t == Type::q4_0 ? 18 : t == Type::q4_1 ? 20 : t == Type::q4_k ? 144 : 210;
  return inputs / unit_inputs(t) * unit;
}

// Element i of an array of f32, bf16 or f16.
float element(const void* data, Type type, int64_t i);

// One output's weights, `inputs` of them, into its column of a panel: from f32, bf16 or f16, of which q8_0 makes
// blocks as ggml does, or from blocks of the linear's own type as GGUF stores them. Throws std::invalid_argument,
// and std::runtime_error for what is no number or does not fit.
void pack(const Linear& linear, int panel, int64_t which, int64_t column, const void* from, Type type);

// Back to fp32.
void unpack(const Linear& linear, int panel, int64_t which, int64_t column, float* out);

}  // namespace specinfer
