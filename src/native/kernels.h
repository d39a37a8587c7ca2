// What one instruction-set level offers: the inner loops, behind plain functions.
#pragma once
#include <cstdint>

namespace specinfer {

// f16 is read, but not stored. bf16_pairs is how bf16 lies where an instruction multiplies pairs of it: rows are rounded
// to bf16 to meet it. From q8_0 on, arithmetic is in integers, on rows that were quantised; q8_quads and q6_quads are
// how q8_0 and q6_k lie where an instruction multiplies four bytes at once.
enum class Type { f32, bf16, f16, bf16_pairs, q8_0, q8_quads, q4_0, q4_1, q4_k, q6_k, q6_quads };

// A packed linear layer: panels of `panel` output columns, as packing.h lays them out. Missing columns are zero.
struct Linear {
  Type type = Type::f32;
  int inputs = 0;
  int outputs = 0;
  int panels = 0;
  char* data = nullptr;
  float* bias = nullptr;  // [panels * panel] or null
};

enum class Store {
  plain,     // out = y
  add,       // out = out + y
  gated,     // panels alternate between gate and up: out = silu(gate) * up, half as wide
  relu,      // out = max(y, 0)
  gelu,      // out = gelu(y), by its tanh formula
};

struct GemmArgs {
  const Linear* linear;
  const void* x;  // rows of x_stride bytes: fp32, or what `quantize` made of it where `converts_rows`
  int64_t x_stride;
  int rows;
  float* out;  // [rows, out_stride]
  int64_t out_stride;
  int columns;  // of `out` that may be written
  Store store;
  const char* next = nullptr;  // what a thread reads after these panels, where that is known; of use to more than 2 rows
};

// One span's keys as the queries of a forward see them.
struct SpanView {
  const int64_t* context;  // [context_len] slots by position
  int64_t context_len;
  const int64_t* slots;  // [nodes]
  const int32_t* depth;  // [nodes]
  // A node's ancestors and itself, by depth: nodes 0 .. trunk - 1, then `path`.
  const int32_t* trunk;        // [nodes]
  const int32_t* path_offset;  // [nodes]
  const int32_t* path;
  int first_row;
};

struct AttentionArgs {
  Type type;
  const void* keys;  // [slots, kv_heads, head_dim]
  const void* values;
  int heads, kv_heads, head_dim;
  int64_t window;  // the last positions that a query sees, its own included
  float scale;
  const float* q;  // [rows, q_stride]
  int64_t q_stride;
  float* out;  // [rows, out_stride]
  int64_t out_stride;
};

constexpr int KEY_CHUNK = 32;   // keys per chunk, at fixed absolute positions
constexpr int KEY_BLOCK = 256;  // likewise: a query's sums over a block, made by any thread, are added up in order
constexpr int QUERY_BLOCK = 48;

// Floats.
static inline int64_t attention_part(int head_dim) { return head_dim + 32; }
static inline int64_t attention_scratch(int head_dim) {
  return 2LL * KEY_CHUNK * head_dim + int64_t(QUERY_BLOCK) * 2 * (head_dim + 16);
}

struct Kernels {
  const char* name;
  int panel;
  void (*gemm)(const GemmArgs&, int panel_begin, int panel_end);
  void (*quantize)(const float* x, int inputs, Type type, void* out);
  // Queries [begin, end) of one K/V head: query i is node i / group, head i % group of the group. Over all keys, or, where
  // there are `parts`, over those of one block: a query's sums to its part of [end - begin, attention_part].
  void (*attention)(const AttentionArgs&, const SpanView&, int kv_head, int begin, int end, int block, float* parts,
                    float* scratch);
  // The same over all keys from the parts of all blocks, [blocks, end - begin, attention_part].
  void (*join)(const AttentionArgs&, const SpanView&, int kv_head, int begin, int end, int blocks, const float* parts,
               float* scratch);
  void (*rms_norm)(const float* x, const float* weight, float* out, int n, int padded, float eps);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float* out, int n, int padded, float eps);
  // RMSNorm of each of `heads` neighbours, in place.
  void (*head_norm)(float* x, const float* weight, int heads, int head_dim, float eps);
  void (*rotate)(float* x, int heads, int head_dim, const float* cos, const float* sin);
  void (*to_kv)(const float* x, void* out, int64_t n, Type type);
  Type bf16 = Type::bf16, q8_0 = Type::q8_0, q6_k = Type::q6_k;  // what these weights are kept as

  Type kept(Type t) const { return t == Type::bf16 ? bf16 : t == Type::q8_0 ? q8_0 : t == Type::q6_k ? q6_k : t; }
};

const Kernels& portable_kernels();
#ifdef SPECINFER_X86
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_bf16_kernels();
#endif

// The level that SPECINFER_CPU names, or the best that this CPU has. Throws std::invalid_argument.
const Kernels& choose_kernels(const char* name);

static inline float from_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

static inline uint16_t to_bf16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 64);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace specinfer
