// Tree attention: every query's keys in position order, in chunks and blocks that begin at multiples of KEY_CHUNK and
// KEY_BLOCK, so that its bits depend on its own keys alone. Included inside a level's namespace.

// Slots are scattered over the pool: rows of the next chunk are asked for while this one is worked on, into the second
// cache, which waits for more lines at a time than the first. Inlined by force: GCC drops calls of functions that only
// fetch.
INLINE void fetch(const AttentionArgs& a, int kv_head, int64_t slot) {
  const int64_t size = a.type == Type::f32 ? 4 : 2, at = (slot * a.kv_heads + kv_head) * a.head_dim * size;
  for (int64_t byte = 0; byte < a.head_dim * size; byte += 64) {
    __builtin_prefetch(static_cast<const char*>(a.keys) + at + byte, 0, 2);
    __builtin_prefetch(static_cast<const char*>(a.values) + at + byte, 0, 2);
  }
}

INLINE int within_chunk(int64_t key) { return key < 0 ? 0 : key > KEY_CHUNK ? KEY_CHUNK : int(key); }

// Chunk: begin(i, q) starts query i; restart(i) its sums; clear() forgets the keys of the chunk before; set(slots) loads
// those of its keys that are not -1; attend(i, n, first, last) shows keys first to last - 1 to n queries from the i-th on.
// fold(i) adds the sums to those of the blocks before; save(i, part) and resume(i, part) keep and take them; finish(i, out)
// ends it.

// Shows the keys at positions oldest to keys - 1, the first of which begins a chunk.
template <class Chunk>
INLINE void show(const AttentionArgs& a, const SpanView& span, int kv_head, int begin, int end, int64_t oldest, int64_t keys,
                 Chunk& chunk) {
  const int group = a.heads / a.kv_heads, nodes = (end - 1) / group + 1;
  int chain = 0;  // of the nodes, those that follow each other from the top
  while (chain < nodes && span.trunk[chain] == chain + 1) ++chain;
  for (int64_t start = oldest; start < keys; start += KEY_CHUNK) {
    const int64_t next = start + KEY_CHUNK, after = next + KEY_CHUNK;
    for (int64_t at = next; at < after && at < span.context_len; ++at) fetch(a, kv_head, span.context[at]);
    chunk.clear();
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
      if (first >= last) continue;
      // Keys that the nodes below will see come along.
      int64_t own[KEY_CHUNK];
      const int64_t* slots = own;
      if (first == 0 && next <= span.context_len) {
        slots = span.context + start;
      } else {
        for (int j = 0; j < KEY_CHUNK; ++j) {
          const int64_t d = start + j - span.context_len, below = d - span.trunk[node];
          own[j] = -1;
          if (j >= first && j < last)
            own[j] = d < 0 ? span.context[start + j] : below < 0 ? span.slots[d] : span.slots[span.path[span.path_offset[node] + below]];
          else if (j >= last && d >= 0 && d < chain)
            own[j] = span.slots[d];
        }
      }
      chunk.set(slots);
      chunk.attend(i - begin, to - i, first, last);
    }
  }
}

// Where query i of a head begins, in rows of `stride`.
INLINE int64_t place(const AttentionArgs& a, const SpanView& span, int kv_head, int i, int64_t stride) {
  const int group = a.heads / a.kv_heads;
  return (span.first_row + i / group) * stride + (kv_head * group + i % group) * a.head_dim;
}

// See Kernels::attention.
template <class Chunk>
INLINE void walk(const AttentionArgs& a, const SpanView& span, int kv_head, int begin, int end, int64_t block, float* parts,
                 Chunk& chunk) {
  const int group = a.heads / a.kv_heads;
  int64_t oldest = INT64_MAX, keys = 0;  // positions that some query sees: oldest to keys - 1
  for (int i = begin; i < end; ++i) {
    chunk.begin(i - begin, a.q + place(a, span, kv_head, i, a.q_stride));
    const int64_t seen = span.context_len + span.depth[i / group] + 1;
    const int64_t first = seen > a.window ? seen - a.window : 0;
    oldest = first < oldest ? first : oldest;
    keys = seen > keys ? seen : keys;
  }
  oldest = oldest / KEY_CHUNK * KEY_CHUNK;
  const auto show_block = [&](int64_t from) {
    const int64_t to = from + KEY_BLOCK;
    for (int i = begin; i < end; ++i) chunk.restart(i - begin);
    show(a, span, kv_head, begin, end, from > oldest ? from : oldest, to < keys ? to : keys, chunk);
  };
  const int64_t start = parts && block * KEY_BLOCK > oldest ? block * KEY_BLOCK : oldest;
  for (int64_t at = start; at < start + KEY_CHUNK && at < span.context_len; ++at) fetch(a, kv_head, span.context[at]);
  if (parts) {
    show_block(block * KEY_BLOCK);
    for (int i = begin; i < end; ++i) chunk.save(i - begin, parts + (i - begin) * attention_part(a.head_dim));
    return;
  }
  for (int64_t from = oldest / KEY_BLOCK * KEY_BLOCK; from < keys; from += KEY_BLOCK) {
    show_block(from);
    for (int i = begin; i < end; ++i) chunk.fold(i - begin);
  }
  for (int i = begin; i < end; ++i) chunk.finish(i - begin, a.out + place(a, span, kv_head, i, a.out_stride));
}

// See Kernels::join.
template <class Chunk>
INLINE void join_parts(const AttentionArgs& a, const SpanView& span, int kv_head, int begin, int end, int blocks,
                       const float* parts, Chunk& chunk) {
  for (int i = begin; i < end; ++i) chunk.begin(i - begin, a.q + place(a, span, kv_head, i, a.q_stride));
  for (int b = 0; b < blocks; ++b)
    for (int i = begin; i < end; ++i, parts += attention_part(a.head_dim)) {
      chunk.resume(i - begin, parts);
      chunk.fold(i - begin);
    }
  for (int i = begin; i < end; ++i) chunk.finish(i - begin, a.out + place(a, span, kv_head, i, a.out_stride));
}
