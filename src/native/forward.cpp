#include "forward.h"

#include <algorithm>
#include <cstring>

namespace specinfer {

enum Op {
  INPUT_NORM, QKV, QUANTIZE_FOR_V, V, STORE_KV, ATTEND, JOIN, QUANTIZE_ATTENDED, OUT, POST_NORM, INNER, QUANTIZE_INNER, DOWN,
  CAPTURE, PER_LAYER, BEGIN = PER_LAYER, FEATURES, FINAL_NORM, HEAD, END
};

constexpr int BEFORE_LAYERS = 2, AFTER_LAYERS = 3;  // phases
constexpr float FEATURES_EPS = 1e-6f;
constexpr int64_t CHUNK_BYTES = 1 << 19;
constexpr int64_t FETCHED_BYTES = 1 << 18;  // of K/V by a thread: a part of its cache

void Forward::run(const Batch& batch, Pool& pool) {
  plan(batch, pool.threads());
  pool.run(*this);
}

GemmArgs Forward::gemm(int op, int index) {
  const int n = int(b_.num_rows);
  const Shape& s = w_.shape;
  auto args = [&](const Linear& linear, const std::vector<float>& x, int64_t x_stride, int rows, float* out,
                  int64_t out_stride, Store store, int64_t columns = 0) {
    GemmArgs a{&linear, x.data(), 4 * x_stride, rows, out, out_stride, int(columns ? columns : out_stride), store};
    if (converts_rows(linear.type)) {
      a.x = quantized_.data();
      a.x_stride = row_bytes(linear);
    }
    return a;
  };
  if (op == HEAD) return args(w_.head, normed_, hidden_stride_, int(b_.num_logits), b_.logits, s.head_size, Store::plain);
  float* hidden = hidden_.data();
  if (op == FEATURES) return args(w_.features, read_, read_stride_, n, hidden, hidden_stride_, Store::plain);
  const Layer& layer = w_.layers[index];
  switch (op) {
    case QKV:
      return args(layer.qkv, normed_, hidden_stride_, n, qkv_rows_.data(), qkv_stride_, Store::plain, layer.qkv.outputs);
    case V:
      return args(layer.v, normed_, hidden_stride_, n, qkv_rows_.data() + layer.qkv.outputs, qkv_stride_, Store::plain,
                  layer.v.outputs);
    case OUT:
      return args(layer.out, attended_, s.heads * s.head_dim, n, hidden, hidden_stride_, Store::add);
    case INNER:
      return args(layer.inner, normed_, hidden_stride_, n, inner_.data(), inner_stride_, s.inner);
    default:
      return args(layer.down, inner_, inner_stride_, n, hidden, hidden_stride_, Store::add);
  }
}

int Forward::panels_per_chunk(const GemmArgs& args) const {
  const int64_t bytes = panel_bytes(args.linear->type, args.linear->inputs, w_.kernels.panel);
  const int64_t share = args.linear->panels / (8 * threads_), cap = std::max<int64_t>(2, CHUNK_BYTES / bytes);
  const int64_t least = args.linear->panels / 60000 + 1, pair = args.store == Store::gated ? 2 : 1;
  return int((std::max(least, std::min(share, cap)) + pair - 1) / pair * pair);
}

int Forward::num_chunks(const GemmArgs& args) const {
  const int per_chunk = panels_per_chunk(args);
  return (args.linear->panels + per_chunk - 1) / per_chunk;
}

// Where this worker's share of the linear layer after `op` begins.
const char* Forward::next_weights(int op, int layer, int worker) {
  if (op == HEAD || op == FEATURES || (op == DOWN && layer + 1 == b_.last_layer && !b_.num_logits)) return nullptr;
  if (op == QKV && w_.layers[layer].v.panels) return nullptr;
  const bool last = op == DOWN && layer + 1 == b_.last_layer;
  const int next = op == QKV || op == V ? OUT : op == OUT ? INNER : op == INNER ? DOWN : last ? HEAD : QKV;
  const GemmArgs args = gemm(next, op == DOWN ? layer + 1 : layer);
  const int per_chunk = panels_per_chunk(args);
  const int64_t panel = Pool::share(num_chunks(args), worker, threads_) * per_chunk;
  return args.linear->data + panel * panel_bytes(args.linear->type, args.linear->inputs, w_.kernels.panel);
}

// Asks for the keys and values that this worker's share of the attention will begin with: one row after the other, they
// come at memory's latency there, but beside the streams of weights here. Each chunk of its share asks for a part.
// Inlined by force: GCC drops calls of functions that only fetch.
__attribute__((always_inline)) inline void Forward::fetch_keys(int layer, int chunk, int chunks, int worker) const {
  const auto share = [&](int64_t n, int which) { return Pool::share(n, which, threads_); };
  const int64_t begin = share(chunks, worker), end = share(chunks, worker + 1), num_units = int64_t(units_.size());
  const int64_t first = share(num_units, worker), last = share(num_units, worker + 1);
  if (chunk < begin || chunk >= end || first == last) return;
  const int64_t row = w_.shape.head_dim * (kv_.type == Type::f32 ? 4 : 2);
  const int64_t most = FETCHED_BYTES / (2 * row * (last - first));
  for (int64_t i = first; i < last; ++i) {
    const Unit& u = units_[i];
    const auto same_keys = [&](const Unit& v) { return v.span == u.span && v.kv_head == u.kv_head && v.block == u.block; };
    if (i > first && same_keys(units_[i - 1])) continue;
    const SpanView& span = spans_[u.span];
    const bool whole = u.parts < 0;
    const int64_t oldest = std::max({int64_t(0), span.context_len - w_.shape.windows[layer], int64_t(u.block) * KEY_BLOCK});
    const int64_t newest = whole ? span.context_len : std::min(span.context_len, (int64_t(u.block) + 1) * KEY_BLOCK);
    const int64_t count = std::clamp<int64_t>(newest - oldest, 0, most);
    const int64_t from = count * (chunk - begin) / (end - begin), to = count * (chunk + 1 - begin) / (end - begin);
    for (int64_t k = oldest + from; k < oldest + to; ++k) {
      const int64_t at = (span.context[k] * w_.shape.kv_heads + u.kv_head) * row;
      for (int64_t byte = 0; byte < row; byte += 64) {
        __builtin_prefetch(static_cast<const char*>(kv_.keys[layer]) + at + byte, 0, 2);
        __builtin_prefetch(static_cast<const char*>(kv_.values[layer]) + at + byte, 0, 2);
      }
    }
  }
}

void Forward::quantize(const Linear& linear, const float* x, int64_t row) {
  if (converts_rows(linear.type))
    w_.kernels.quantize(x, linear.inputs, linear.type, quantized_.data() + row * row_bytes(linear));
}

void Forward::normalize(const Norm& norm, const float* x, float* out) const {
  const int n = w_.shape.hidden, padded = int(hidden_stride_);
  if (w_.shape.layer_norm)
    w_.kernels.layer_norm(x, norm.weight, norm.bias, out, n, padded, w_.shape.eps);
  else
    w_.kernels.rms_norm(x, norm.weight, out, n, padded, w_.shape.eps);
}

void Forward::store_kv(int index, int64_t row) {
  const Shape& s = w_.shape;
  const Kernels& kernels = w_.kernels;
  const int64_t at = positions_[row] * s.head_dim, kv = int64_t(s.kv_heads) * s.head_dim;
  const int64_t out = b_.slots[row] * kv * (kv_.type == Type::f32 ? 4 : 2);
  float* q = qkv_rows_.data() + row * qkv_stride_;
  float* k = q + int64_t(s.heads) * s.head_dim;
  if (s.head_norms) {
    kernels.head_norm(q, w_.layers[index].q_norm.weight, s.heads, s.head_dim, s.eps);
    kernels.head_norm(k, w_.layers[index].k_norm.weight, s.kv_heads, s.head_dim, s.eps);
  }
  if (tables_.cosine) kernels.rotate(q, s.heads + s.kv_heads, s.head_dim, tables_.cosine + at, tables_.sine + at);
  kernels.to_kv(k, static_cast<char*>(kv_.keys[index]) + out, kv, kv_.type);
  kernels.to_kv(k + kv, static_cast<char*>(kv_.values[index]) + out, kv, kv_.type);
}

// The target's embedding of the token and its row before it, each with a root mean square of 1.
void Forward::read_features(int64_t row) {
  const int n = w_.shape.hidden;
  float *hidden = hidden_.data() + row * hidden_stride_, *normed = normed_.data() + row * hidden_stride_;
  float* features = read_.data() + row * read_stride_;
  std::memset(features, 0, 4 * read_stride_);
  for (int half = 0; half < 2; ++half) {
    std::memset(hidden, 0, 4 * hidden_stride_);
    if (half == 0)
      features_.target->embed(b_.token_ids[row], hidden);
    else
      std::memcpy(hidden, features_.rows + before_[row] * n, 4 * n);
    w_.kernels.rms_norm(hidden, ones_.data(), normed, n, int(hidden_stride_), FEATURES_EPS);
    std::memcpy(features + half * n, normed, 4 * n);
  }
  quantize(w_.features, features, row);
}

// For the drafts that read it; a draft's own where the target has none.
void Forward::keep_row(int64_t row) const {
  const float* hidden = hidden_.data() + row * hidden_stride_;
  const int64_t n = w_.shape.hidden, at = b_.slots[row] * n;
  for (float* rows : features_.kept) std::memcpy(rows + at, hidden, 4 * n);
  if (features_.rows && b_.slots[row] >= features_.own_slot) std::memcpy(features_.rows + at, hidden, 4 * n);
}

static bool is_gemm(int op) {
  return op == QKV || op == V || op == OUT || op == INNER || op == DOWN || op == HEAD || op == FEATURES;
}

bool Forward::reads_features() const {
  return w_.shape.features && b_.first_layer == 0 && b_.last_layer > 0;
}

bool Forward::keeps_rows(int layer) const {
  return layer + 1 == w_.shape.layers && (features_.rows || !features_.kept.empty());
}

int Forward::op_at(int phase) const {
  const int after = phase - BEFORE_LAYERS - (b_.last_layer - b_.first_layer) * PER_LAYER;
  if (phase < BEFORE_LAYERS) return BEGIN + phase;
  return after >= 0 ? FINAL_NORM + after : (phase - BEFORE_LAYERS) % PER_LAYER;
}

int Forward::layer_at(int phase) const { return b_.first_layer + (phase - BEFORE_LAYERS) / PER_LAYER; }

int Forward::chunks(int phase) {
  const int num_layers = b_.last_layer - b_.first_layer;
  if (phase >= BEFORE_LAYERS + num_layers * PER_LAYER + AFTER_LAYERS) return -1;
  const int op = op_at(phase), layer = layer_at(phase);
  if (op == FEATURES && !reads_features()) return 0;
  const int64_t rows = op == FINAL_NORM || op == HEAD ? b_.num_logits : b_.num_rows;
  if (rows == 0) return 0;
  if (op == INPUT_NORM) w_.wait_for(layer);
  if ((op == QUANTIZE_FOR_V || op == V) && w_.layers[layer].v.panels == 0) return 0;
  if (is_gemm(op)) return num_chunks(gemm(op, layer));
  if (op == ATTEND) return std::min<int>(int(units_.size()), 60000);
  if (op == JOIN) return int(joints_.size());
  if (op == QUANTIZE_FOR_V && !converts_rows(w_.layers[layer].v.type)) return 0;
  if (op == QUANTIZE_ATTENDED && !converts_rows(w_.layers[layer].out.type)) return 0;
  if (op == QUANTIZE_INNER && !converts_rows(w_.layers[layer].down.type)) return 0;
  if (op == CAPTURE && !keeps_rows(layer) &&
      std::find(b_.captured, b_.captured + b_.num_captured, layer) == b_.captured + b_.num_captured)
    return 0;
  if (op == END && !b_.hidden_out) return 0;
  return int((rows + row_chunk_ - 1) / row_chunk_);
}

void Forward::run(int phase, int chunk, int worker) {
  const int op = op_at(phase), layer = layer_at(phase);
  if (is_gemm(op)) {
    GemmArgs args = gemm(op, layer);
    const int per_chunk = panels_per_chunk(args), begin = chunk * per_chunk;
    const int chunks = num_chunks(args);
    if (op == QKV) fetch_keys(layer, chunk, chunks, worker);
    if (chunk + 1 == Pool::share(chunks, worker + 1, threads_)) args.next = next_weights(op, layer, worker);
    w_.kernels.gemm(args, begin, std::min(args.linear->panels, begin + per_chunk));
  } else if (op == ATTEND || op == JOIN) {
    const Shape& s = w_.shape;
    const AttentionArgs args{kv_.type, kv_.keys[layer], kv_.values[layer], s.heads, s.kv_heads, s.head_dim,
                             s.windows[layer], 1.0f / __builtin_sqrtf(float(s.head_dim)), qkv_rows_.data(), qkv_stride_,
                             attended_.data(), s.heads * s.head_dim};
    float* scratch = scratch_.data() + worker * scratch_size_;
    if (op == JOIN) {
      const auto& [u, blocks] = joints_[chunk];
      w_.kernels.join(args, spans_[u.span], u.kv_head, u.begin, u.end, blocks, parts_.data() + u.parts, scratch);
      return;
    }
    const int stride = std::min<int>(int(units_.size()), 60000);
    for (size_t i = chunk; i < units_.size(); i += stride) {
      const Unit& u = units_[i];
      float* parts = u.parts < 0 ? nullptr : parts_.data() + u.parts;
      w_.kernels.attention(args, spans_[u.span], u.kv_head, u.begin, u.end, u.block, parts, scratch);
    }
  } else {
    const int64_t rows = op == FINAL_NORM ? b_.num_logits : b_.num_rows, begin = chunk * row_chunk_;
    run_rows(op, layer, begin, std::min(rows, begin + row_chunk_));
  }
}

void Forward::run_rows(int op, int index, int64_t begin, int64_t end) {
  const Shape& s = w_.shape;
  for (int64_t i = begin; i < end; ++i) {
    float* hidden = hidden_.data() + i * hidden_stride_;
    float* normed = normed_.data() + i * hidden_stride_;
    switch (op) {
      case BEGIN:
        if (reads_features()) {
          read_features(i);
        } else if (b_.hidden_in) {
          std::memset(hidden, 0, 4 * hidden_stride_);
          std::memcpy(hidden, b_.hidden_in + i * s.hidden, 4 * s.hidden);
        } else {
          w_.embed(b_.token_ids[i], hidden);
          if (const float* learned = tables_.learned) {
            learned += positions_[i] * s.hidden;
            for (int k = 0; k < s.hidden; ++k) hidden[k] += learned[k];
          }
        }
        break;
      case INPUT_NORM:
      case POST_NORM: {
        const Layer& layer = w_.layers[index];
        normalize(op == INPUT_NORM ? layer.input_norm : layer.post_norm, hidden, normed);
        quantize(op == INPUT_NORM ? layer.qkv : layer.inner, normed, i);
        break;
      }
      case QUANTIZE_FOR_V:
        quantize(w_.layers[index].v, normed, i);
        break;
      case QUANTIZE_ATTENDED:
        quantize(w_.layers[index].out, attended_.data() + i * s.heads * s.head_dim, i);
        break;
      case QUANTIZE_INNER:
        quantize(w_.layers[index].down, inner_.data() + i * inner_stride_, i);
        break;
      case FINAL_NORM:
        normalize(w_.final_norm, hidden_.data() + b_.logits_rows[i] * hidden_stride_, normed);
        quantize(w_.head, normed, i);
        break;
      case STORE_KV:
        store_kv(index, i);
        break;
      case CAPTURE: {
        const int64_t which = std::find(b_.captured, b_.captured + b_.num_captured, index) - b_.captured;
        if (which < b_.num_captured) std::memcpy(b_.capture_out[which] + i * s.hidden, hidden, 4 * s.hidden);
        if (keeps_rows(index)) keep_row(i);
        break;
      }
      case END:
        std::memcpy(b_.hidden_out + i * s.hidden, hidden, 4 * s.hidden);
        break;
    }
  }
}

}  // namespace specinfer
