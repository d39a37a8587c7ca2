// What a forward knows before it begins: checked, and laid out for its phases.
#include <algorithm>
#include <stdexcept>

#include "forward.h"

namespace specinfer {

constexpr int64_t LEAST_QUERIES = 4;     // of a unit, on average
constexpr int64_t MOST_PARTS = 1 << 24;  // floats

static void check(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

void Forward::plan_span(int64_t first, int64_t length, const int64_t* context, int64_t context_len) {
  const int64_t* parents = b_.parents + first;
  const int64_t last = context_len ? context[context_len - 1] : features_.null_slot;
  for (int64_t i = 0; i < length; ++i) {
    const int64_t parent = parents[i], row = first + i;
    check(parent >= -1 && parent < i, "a parent must come before its child");
    depth_[row] = parent < 0 ? 0 : depth_[first + parent] + 1;
    positions_[row] = context_len + depth_[row];
    check(positions_[row] < tables_.count, "a position lies beyond the tables");
    if (w_.shape.features) {
      // A token that the target has not read has no row of its own to be read yet: its child reads what it reads.
      const int64_t above = parent < 0 ? 0 : b_.slots[first + parent];
      before_[row] = parent < 0 ? last : above < features_.own_slot ? above : before_[first + parent];
    }
    path_offset_[row] = int32_t(path_.size());
    // On the chain from the top, a token's path is 0 .. i; elsewhere the chain's part and then a list.
    if (parent == i - 1 && (i == 0 || trunk_[row - 1] == i)) {
      trunk_[row] = int32_t(i + 1);
      continue;
    }
    int64_t top = i;
    while (top >= 0 && trunk_[first + top] != top + 1) top = parents[top];
    trunk_[row] = top < 0 ? 0 : int32_t(top + 1);
    path_.resize(path_.size() + depth_[row] + 1 - trunk_[row]);
    int64_t at = i;
    for (size_t k = path_.size(); k > size_t(path_offset_[row]); --k, at = parents[at]) path_[k - 1] = int32_t(at);
  }
}

void Forward::plan(const Batch& batch, int threads) {
  b_ = batch;
  threads_ = threads;
  const Shape& s = w_.shape;
  const int panel = w_.kernels.panel;
  const int64_t n = b_.num_rows;
  check(!reads_features() || (features_.target && b_.token_ids), "a draft that reads features needs its target, and tokens");
  check(b_.first_layer >= 0 && b_.first_layer <= b_.last_layer && b_.last_layer <= s.layers, "no such layers");
  depth_.assign(n, 0);
  trunk_.assign(n, 0);
  path_offset_.assign(n, 0);
  positions_.assign(n, 0);
  before_.assign(n, 0);
  path_.clear();
  int64_t row = 0, context = 0;
  spans_.clear();
  for (int64_t i = 0; i < b_.num_spans; ++i) {
    const int64_t length = b_.span_lens[i], context_len = b_.context_lens[i];
    check(length >= 0 && context_len >= 0 && row + length <= n && context + context_len <= b_.num_context_slots,
          "spans and rows disagree");
    plan_span(row, length, b_.context_slots + context, context_len);
    spans_.push_back({b_.context_slots + context, context_len, b_.slots + row, nullptr, nullptr, nullptr, nullptr,
                      int(row)});
    row += length;
    context += context_len;
  }
  check(row == n && context == b_.num_context_slots, "spans and rows disagree");
  for (SpanView& span : spans_) {
    span.depth = depth_.data() + span.first_row;
    span.trunk = trunk_.data() + span.first_row;
    span.path_offset = path_offset_.data() + span.first_row;
    span.path = path_.data();
  }
  const int vocab = (reads_features() ? *features_.target : w_).shape.vocab;
  for (int64_t i = 0; i < n; ++i) {
    check(b_.slots[i] >= 0 && b_.slots[i] < kv_.slots, "a slot lies outside the pool");
    check(!b_.token_ids || (b_.token_ids[i] >= 0 && b_.token_ids[i] < vocab), "a token id lies outside the vocabulary");
  }
  for (int64_t i = 0; i < context; ++i)
    check(b_.context_slots[i] >= 0 && b_.context_slots[i] < kv_.slots, "a slot lies outside the pool");
  for (int64_t i = 0; i < b_.num_logits; ++i)
    check(b_.logits_rows[i] >= 0 && b_.logits_rows[i] < n, "a logits row lies outside the batch");

  row_chunk_ = std::clamp<int64_t>((n + threads - 1) / threads, 2, 8);
  hidden_stride_ = s.padded_hidden(panel);
  auto grow = [](std::vector<float>& v, int64_t size) {
    if (int64_t(v.size()) < size) v.resize(size);
  };
  const Layer* layer = w_.layers.data();
  qkv_stride_ = round_up(int64_t(s.heads + 2 * s.kv_heads) * s.head_dim, panel);
  inner_stride_ = s.layers ? int64_t(layer->inner.panels) / (s.inner == Store::gated ? 2 : 1) * panel : 0;
  grow(hidden_, n * hidden_stride_);
  if (reads_features()) {
    read_stride_ = round_up(2 * s.hidden, panel);
    grow(read_, n * read_stride_);
    ones_.assign(hidden_stride_, 1.0f);
  }
  grow(normed_, std::max(n, b_.num_logits) * hidden_stride_);
  grow(qkv_rows_, n * qkv_stride_);
  grow(attended_, n * s.heads * s.head_dim);
  grow(inner_, n * inner_stride_);
  scratch_size_ = (attention_scratch(s.head_dim) + 31) / 16 * 16;
  grow(scratch_, scratch_size_ * threads);
  int64_t quantized = std::max(row_bytes(w_.head) * b_.num_logits, reads_features() ? row_bytes(w_.features) * n : 0);
  for (const Layer& l : w_.layers)
    for (const Linear* linear : {&l.qkv, &l.v, &l.out, &l.inner, &l.down})
      quantized = std::max(quantized, row_bytes(*linear) * n);
  if (int64_t(quantized_.size()) < quantized) quantized_.resize(quantized);

  if (b_.first_layer < b_.last_layer) plan_attention();
}

// All keys for as many of a head's queries as go together, since their keys are loaded once. Where such units are too few
// for the threads, a block of keys each, if what they leave is not too much; and of a single block, fewer queries.
void Forward::plan_attention() {
  const Shape& s = w_.shape;
  const int64_t group = s.heads / s.kv_heads, heads = int64_t(spans_.size()) * s.kv_heads;
  int64_t parts = 1;
  while (heads * parts % threads_ && heads * parts < 4 * threads_ && LEAST_QUERIES * heads * parts < b_.num_rows * s.heads)
    ++parts;
  units_.clear();
  joints_.clear();
  std::vector<Joint> whole;
  int64_t num_parts = 0;
  for (size_t i = 0; i < spans_.size(); ++i) {
    const int64_t row = spans_[i].first_row, rows = b_.span_lens[i], count = rows * group;
    const int64_t last = rows ? *std::max_element(&positions_[row], &positions_[row] + rows) : 0;
    const int blocks = int(last / KEY_BLOCK) + 1;
    const int step = int(std::clamp<int64_t>(blocks > 1 ? QUERY_BLOCK : (count + parts - 1) / parts, 1, QUERY_BLOCK));
    for (int h = 0; h < s.kv_heads; ++h)
      for (int begin = 0; begin < count; begin += step)
        whole.push_back({{int(i), h, begin, std::min(int(count), begin + step)}, blocks});
    num_parts += blocks * count * s.kv_heads;
  }
  const bool few = threads_ > 1 && int64_t(whole.size()) < 4 * threads_;
  const bool split = few && num_parts * attention_part(s.head_dim) <= MOST_PARTS;
  int64_t size = 0;
  for (auto& [unit, blocks] : whole) {
    Unit u = unit;
    if (split && blocks > 1) {
      u.parts = size;
      joints_.push_back({u, blocks});
      for (; u.block < blocks; ++u.block, u.parts += (u.end - u.begin) * attention_part(s.head_dim)) units_.push_back(u);
      size = u.parts;
    } else {
      units_.push_back(u);
    }
  }
  if (int64_t(parts_.size()) < size) parts_.resize(size);
}

}  // namespace specinfer
