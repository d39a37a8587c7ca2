// One forward of a model over a flattened batch, as a job of phases: no tensor library, nothing per layer outside.
#pragma once
#include <cstdint>
#include <vector>

#include "pool.h"
#include "weights.h"

namespace specinfer {

// K/V of every layer: [slots, kv_heads, head_dim].
struct KvPool {
  Type type = Type::f32;
  int64_t slots = 0;
  std::vector<void*> keys, values;
};

// What a position gives: an angle to q and k, or a learned row to the embedding. The others are null.
struct Positions {
  const float* cosine = nullptr;   // [count, head_dim]
  const float* sine = nullptr;     // likewise, with the sign of the rotated first half
  const float* learned = nullptr;  // [count, hidden]
  int64_t count = 0;
};

// Last hidden rows of a target's, before its final norm, under the slots of their tokens: [slots, hidden].
struct Features {
  const Weights* target = nullptr;  // of a draft that reads them beside its tokens, which are the target's
  float* rows = nullptr;            // that it reads; from own_slot on, where the target writes nothing, its own
  int64_t own_slot = 0, null_slot = 0;  // null_slot: a row of zeros
  std::vector<float*> kept;         // of a target: the rows that its drafts read
};

// Flattened over spans. Rows are tokens; parents count within their span.
struct Batch {
  const int64_t* context_slots;
  int64_t num_context_slots;
  const int64_t* context_lens;  // [spans]
  const int64_t* span_lens;     // [spans]
  int64_t num_spans;
  const int64_t* slots;      // [rows]
  const int64_t* parents;    // [rows]
  const int64_t* token_ids;  // [rows], unless hidden rows come in
  const int64_t* logits_rows;
  int64_t num_rows, num_logits;
  const float* hidden_in;  // [rows, hidden] or null
  float* hidden_out;       // [rows, hidden] or null
  float* logits;           // [num_logits, head_size]
  int first_layer, last_layer;
  const int64_t* captured;  // layers
  float* const* capture_out;
  int64_t num_captured;
};

class Forward : public Job {
 public:
  Forward(const Weights& weights, const KvPool& kv, const Positions& positions, const Features& features)
      : w_(weights), kv_(kv), tables_(positions), features_(features) {}

  // Throws std::invalid_argument where the batch does not fit the model or the pool.
  void run(const Batch& batch, Pool& pool);

  int chunks(int phase) override;
  void run(int phase, int chunk, int worker) override;

 private:
  // Queries of a head over all keys, or over one block of them: then what they leave goes to a place in parts_.
  struct Unit {
    int span, kv_head, begin, end, block = 0;
    int64_t parts = -1;
  };
  struct Joint {
    Unit unit;  // its blocks' parts follow each other from unit.parts on
    int blocks;
  };

  int op_at(int phase) const;
  int layer_at(int phase) const;
  bool reads_features() const;
  bool keeps_rows(int layer) const;
  void plan(const Batch& batch, int threads);
  void plan_attention();
  void plan_span(int64_t first_row, int64_t length, const int64_t* context, int64_t context_len);
  void run_rows(int op, int layer, int64_t begin, int64_t end);
  GemmArgs gemm(int op, int layer);
  const char* next_weights(int op, int layer, int worker);
  int panels_per_chunk(const GemmArgs& args) const;
  int num_chunks(const GemmArgs& args) const;
  void fetch_keys(int layer, int chunk, int chunks, int worker) const;
  void quantize(const Linear& linear, const float* x, int64_t row);
  void normalize(const Norm& norm, const float* x, float* out) const;
  void read_features(int64_t row);
  void keep_row(int64_t row) const;
  void store_kv(int layer, int64_t row);

  const Weights& w_;
  const KvPool& kv_;
  const Positions& tables_;
  const Features& features_;
  Batch b_{};
  int threads_ = 1;
  int64_t row_chunk_ = 1;  // rows that are not worth another thread
  int64_t hidden_stride_ = 0, read_stride_ = 0, qkv_stride_ = 0, inner_stride_ = 0, scratch_size_ = 0;
  std::vector<float> hidden_, normed_, read_, ones_, qkv_rows_, attended_, inner_, scratch_;
  std::vector<char> quantized_;  // the rows that the next linear takes, where it is quantised
  std::vector<int64_t> positions_, before_;  // before_: the slot of the row that a token reads
  std::vector<int32_t> depth_, trunk_, path_offset_, path_;
  std::vector<SpanView> spans_;
  std::vector<Unit> units_;
  std::vector<Joint> joints_;
  std::vector<float> parts_;
};

}  // namespace specinfer
