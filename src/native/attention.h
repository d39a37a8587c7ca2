// Tree attention with a running softmax. A query's keys are taken in position order, in chunks that begin at
// multiples of KEY_CHUNK, so its bits depend on its own keys alone. Included inside a level's namespace.

// The keys and values of one chunk, a row each. Neighbouring queries share most of them: only what differs from
// the query before is looked up again (and, for bf16, widened).
struct Chunk {
  const AttentionArgs& a;
  int kv_head;
  float* wide;  // [2, KEY_CHUNK, head_dim], for bf16
  int64_t slot[KEY_CHUNK];
  const float* k[KEY_CHUNK];
  const float* v[KEY_CHUNK];

  // Slots are scattered over the pool: rows of the next chunk are asked for while this one is worked on. Inlined by
  // force: GCC drops calls of functions that only fetch.
  __attribute__((always_inline)) void fetch(int64_t s) const {
    const int64_t size = a.type == Type::f32 ? 4 : 2, at = (s * a.kv_heads + kv_head) * a.head_dim * size;
    for (int64_t byte = 0; byte < a.head_dim * size; byte += 64) {
      __builtin_prefetch(static_cast<const char*>(a.keys) + at + byte);
      __builtin_prefetch(static_cast<const char*>(a.values) + at + byte);
    }
  }

  void set(int j, int64_t s) {
    if (slot[j] == s) return;
    slot[j] = s;
    const int64_t at = (s * a.kv_heads + kv_head) * a.head_dim;
    if (a.type == Type::f32) {
      k[j] = static_cast<const float*>(a.keys) + at;
      v[j] = static_cast<const float*>(a.values) + at;
      return;
    }
    float* wide_k = wide + j * a.head_dim;
    float* wide_v = wide_k + KEY_CHUNK * a.head_dim;
    for (int d = 0; d < a.head_dim; d += W) {
      store(wide_k + d, widen(static_cast<const uint16_t*>(a.keys) + at + d));
      store(wide_v + d, widen(static_cast<const uint16_t*>(a.values) + at + d));
    }
    k[j] = wide_k;
    v[j] = wide_v;
  }
};

// A query's largest score so far, its sum of weights and its weighted values: dim + 2 floats.
constexpr int TOGETHER = 4;  // queries whose chains of dependent operations overlap

// The scores of keys first to last - 1, padded to whole registers with the last one's; returns the largest of each lane.
INLINE F score(const Chunk& c, const float* q, int first, int last, float* weight) {
  const int dim = c.a.head_dim, count = last - first;
  const float* const* keys = c.k + first;
  F top = splat(-__builtin_inff());
  for (int j = 0; j < count; j += W) {
    F dot[W];
    const float* row[W];
#pragma GCC unroll 8
    for (int i = 0; i < W; ++i) {
      row[i] = keys[j + i < count ? j + i : count - 1];
      dot[i] = splat(0.0f);
    }
    for (int d = 0; d < dim; d += W) {
      const F x = load(q + d);
#pragma GCC unroll 8
      for (int i = 0; i < W; ++i) dot[i] = fma(x, load(row[i] + d), dot[i]);
    }
    const F scores = sums(dot) * splat(c.a.scale);
    store(weight + j, scores);
    top = max(top, scores);
  }
  return top;
}

// Scores to weights, relative to the largest score so far; returns what scales the sums before.
INLINE float soften(F top, int count, float* weight, float* state) {
  const float old = state[0], chunk_top = largest(top), now = chunk_top > old ? chunk_top : old;
  F part = splat(0.0f);
  for (int j = 0; j < count; j += W) {
    store(weight + j, exp(load(weight + j) - splat(now)));
    for (int i = count - j; i < W; ++i) weight[j + i] = 0.0f;
    part = part + load(weight + j);
  }
  float shrink[W];
  store(shrink, exp(splat(old - now)));
  const float keep = old == -__builtin_inff() ? 0.0f : shrink[0];
  state[0] = now;
  state[1] = state[1] * keep + sum(part);
  return keep;
}

INLINE void add_values(const Chunk& c, int first, int count, const float* weight, float keep, float* acc) {
  const int dim = c.a.head_dim;
  const float* const* values = c.v + first;
  int d = 0;
  for (; d + 8 * W <= dim; d += 8 * W) {
    F y[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) y[i] = load(acc + d + i * W) * splat(keep);
    for (int j = 0; j < count; ++j) {
      const F p = splat(weight[j]);
      const float* v = values[j] + d;
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) y[i] = fma(p, load(v + i * W), y[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) store(acc + d + i * W, y[i]);
  }
  for (; d < dim; d += W) {
    F y = load(acc + d) * splat(keep);
    for (int j = 0; j < count; ++j) y = fma(splat(weight[j]), load(values[j] + d), y);
    store(acc + d, y);
  }
}

// Adds keys first to last - 1 of a chunk to the states of `queries` queries that see the same ones.
static __attribute__((noinline)) void attend(const Chunk& c, const float* const* q, int queries, int first, int last,
                                             float* state) {
  const int stride = c.a.head_dim + 2;
  alignas(64) float weight[TOGETHER][KEY_CHUNK];
  F top[TOGETHER];
  float keep[TOGETHER];
  for (int n; queries > 0; queries -= n, q += n, state += n * stride) {
    n = queries < TOGETHER ? queries : TOGETHER;
    for (int i = 0; i < n; ++i) top[i] = score(c, q[i], first, last, weight[i]);
    for (int i = 0; i < n; ++i) keep[i] = soften(top[i], last - first, weight[i], state + i * stride);
    for (int i = 0; i < n; ++i) add_values(c, first, last - first, weight[i], keep[i], state + i * stride + 2);
  }
}

INLINE int within_chunk(int64_t key) { return key < 0 ? 0 : key > KEY_CHUNK ? KEY_CHUNK : int(key); }

void attention(const AttentionArgs& a, const SpanView& span, int kv_head, int begin, int end, float* scratch) {
  const int group = a.heads / a.kv_heads, dim = a.head_dim;
  Chunk chunk{a, kv_head, scratch, {}, {}, {}};
  float* states = scratch + 2 * KEY_CHUNK * dim;
  const float* q[QUERY_BLOCK];
  int64_t oldest = INT64_MAX, keys = 0;  // positions that some query sees: oldest to keys - 1
  for (int i = begin; i < end; ++i) {
    q[i - begin] = a.q + (span.first_row + i / group) * a.q_stride + (kv_head * group + i % group) * dim;
    float* state = states + (i - begin) * (dim + 2);
    state[0] = -__builtin_inff();
    for (int d = 1; d < dim + 2; ++d) state[d] = 0.0f;
    const int64_t seen = span.context_len + span.depth[i / group] + 1;
    const int64_t first = seen > a.window ? seen - a.window : 0;
    oldest = first < oldest ? first : oldest;
    keys = seen > keys ? seen : keys;
  }
  oldest = oldest / KEY_CHUNK * KEY_CHUNK;
  for (int64_t at = oldest; at < oldest + KEY_CHUNK && at < span.context_len; ++at) chunk.fetch(span.context[at]);
  for (int64_t start = oldest; start < keys; start += KEY_CHUNK) {
    const int64_t next = start + KEY_CHUNK, after = next + KEY_CHUNK;
    for (int64_t at = next; at < after && at < span.context_len; ++at) chunk.fetch(span.context[at]);
    for (int j = 0; j < KEY_CHUNK; ++j) chunk.slot[j] = -1;
    const auto range = [&](int node) {
      const int64_t seen = span.context_len + span.depth[node] + 1 - start;
      return std::pair<int, int>(within_chunk(seen - a.window), within_chunk(seen));
    };
    for (int i = begin, to; i < end; i = to) {
      const int node = i / group;
      const auto [first, last] = range(node);
      to = (node + 1) * group;
      // In the context, a row is the same for all nodes.
      if (next <= span.context_len)
        while (to < end && range(to / group) == range(node)) to += group;
      to = to < end ? to : end;
      for (int j = first; j < last; ++j) {
        const int64_t at = start + j, d = at - span.context_len;
        chunk.set(j, d < 0                  ? span.context[at]
                     : d < span.trunk[node] ? span.slots[d]
                                            : span.slots[span.path[span.path_offset[node] + d - span.trunk[node]]]);
      }
      if (first < last) attend(chunk, q + (i - begin), to - i, first, last, states + (i - begin) * (dim + 2));
    }
  }
  for (int i = begin; i < end; ++i) {
    const float* state = states + (i - begin) * (dim + 2);
    float* out = a.out + (span.first_row + i / group) * a.out_stride + (kv_head * group + i % group) * dim;
    for (int d = 0; d < dim; ++d) out[d] = state[2 + d] / state[1];
  }
}
