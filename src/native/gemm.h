// y = x W^T over packed panels. One accumulator per (row, column), inputs in order: the bits of a row depend on
// nothing but the row. Included inside a level's namespace.

constexpr int PANEL = 2 * W;
constexpr int MAX_ROWS = W == 16 ? 12 : 6;  // two accumulators each, of 32 or 16 registers

// Calls tile(r), whose r is a constant of the value of `rows`: 1 .. MAX_ROWS.
template <int R = 1, class Tile>
INLINE void with_rows(int rows, const Tile& tile) {
  if (rows == R) return tile(std::integral_constant<int, R>());
  if constexpr (R < MAX_ROWS) with_rows<R + 1>(rows, tile);
}

// One step takes an input, or a pair of inputs in bf16.
template <Type T>
INLINE void panel_step(const char* p, F& lo, F& hi) {
  if (T == Type::bf16) {
    const U w = *reinterpret_cast<const U*>(p);
    lo = (F)(w << 16);
    hi = (F)(w & 0xffff0000u);
  } else {
    lo = load(reinterpret_cast<const float*>(p));
    hi = load(reinterpret_cast<const float*>(p) + W);
  }
}

// acc + x w
template <Type T>
INLINE F add_product(F acc, F x, F w) {
#ifdef __AVX512BF16__
  if (T == Type::bf16_pairs) return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)x);
#endif
  return fma(x, w, acc);
}

// Not inlined into each of the tiles.
static __attribute__((noinline)) void store_row(const GemmArgs& a, int panel, int row, const float* y) {
  F lo = load(y), hi = load(y + W);
  if (a.linear->bias) {
    lo = lo + load(a.linear->bias + int64_t(panel) * PANEL);
    hi = hi + load(a.linear->bias + int64_t(panel) * PANEL + W);
  }
  const bool gated = a.store == Store::gated;
  const int column = (gated ? panel / 2 : panel) * PANEL;
  float* out = a.out + row * a.out_stride + column;
  if (column + PANEL > a.columns) {
    float tail[PANEL];
    store(tail, lo);
    store(tail + W, hi);
    for (int i = 0; column + i < a.columns; ++i) out[i] = a.store == Store::add ? out[i] + tail[i] : tail[i];
    return;
  }
  if (a.store == Store::add) {
    lo = load(out) + lo;
    hi = load(out + W) + hi;
  } else if (gated && panel % 2) {
    lo = silu(load(out)) * lo;
    hi = silu(load(out + W)) * hi;
  } else if (a.store == Store::relu) {
    lo = max(splat(0.0f), lo);
    hi = max(splat(0.0f), hi);
  } else if (a.store == Store::gelu) {
    lo = gelu(lo);
    hi = gelu(hi);
  }
  store(out, lo);
  store(out + W, hi);
}

template <int R>
INLINE void store_panel(const GemmArgs& a, int panel, int row, const F* lo, const F* hi) {
  float y[R][PANEL];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    store(y[r], lo[r]);
    store(y[r] + W, hi[r]);
  }
#pragma GCC unroll 1
  for (int r = 0; r < R; ++r) store_row(a, panel, row + r, y[r]);
}

constexpr int64_t LINE = 64;  // bytes that a prefetch fetches

// What rows that are few fetch ahead of what they read, beside the processor's own prefetching. More rows take longer
// over a panel than memory does, and fetch the next one meanwhile.
constexpr int64_t NEAR = 2048;

// Where block b of `blocks` of rows fetches, beginning with panel `which`: its share of the next one. That may be another
// chunk's: a thread takes neighbours.
INLINE const char* fetch_ahead(const GemmArgs& a, int64_t bytes, int which, int end, int b, int blocks) {
  const char* panel = a.linear->data + which * bytes;
  if (a.rows <= 2) return panel + NEAR;
  if (which + 1 == end && a.next) return a.next + bytes * b / blocks;
  return panel + (which + 1 < a.linear->panels ? bytes : 0) + bytes * b / blocks;
}

// R rows by P neighbouring panels. Every step also fetches `ahead`, moved on by `ahead_step`, of what comes next.
template <Type T, int R, int P>
void tile(const GemmArgs& a, int panel, int row, const char* ahead, int64_t ahead_step) {
  constexpr int64_t step = T == Type::bf16 ? 2 * PANEL : 4 * PANEL;
  const int64_t n = panel_bytes(T, a.linear->inputs, PANEL) / step;
  const char* w = a.linear->data + panel * step * n;
  const float* x[R];
  F lo[P][R], hi[P][R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    x[r] = reinterpret_cast<const float*>(static_cast<const char*>(a.x) + (row + r) * a.x_stride);
#pragma GCC unroll 12
    for (int p = 0; p < P; ++p) lo[p][r] = hi[p][r] = splat(0.0f);
  }
  for (int64_t k = 0; k < n; ++k) {
    F wl[P], wh[P];
#pragma GCC unroll 12
    for (int p = 0; p < P; ++p) {
      panel_step<T>(w + p * step * n, wl[p], wh[p]);
      for (int64_t at = 0; at < step; at += LINE) __builtin_prefetch(ahead + p * step * n + at, 0, 2);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const F v = splat(x[r][k]);
#pragma GCC unroll 12
      for (int p = 0; p < P; ++p) {
        lo[p][r] = add_product<T>(lo[p][r], v, wl[p]);
        hi[p][r] = add_product<T>(hi[p][r], v, wh[p]);
      }
    }
    w += step;
    ahead += ahead_step;
  }
#pragma GCC unroll 12
  for (int p = 0; p < P; ++p) store_panel<R>(a, panel + p, row, lo[p], hi[p]);
}

// Groups of P panels from `begin` on; returns where the rest begins.
template <Type T, int R, int P>
int side_by_side(const GemmArgs& a, int begin, int end) {
  const int64_t bytes = panel_bytes(T, a.linear->inputs, PANEL), step = T == Type::bf16 ? 2 * PANEL : 4 * PANEL;
  for (; begin + P <= end; begin += P)
    tile<T, R, P>(a, begin, 0, a.linear->data + begin * bytes + NEAR, step);
  return begin;
}

template <Type T>
void gemm_of(const GemmArgs& a, int begin, int end) {
  const int64_t bytes = panel_bytes(T, a.linear->inputs, PANEL), step = T == Type::bf16 ? 2 * PANEL : 4 * PANEL;
  // The two accumulators of a single row would wait for each other, and more streams come faster from memory.
  if (a.rows == 1) begin = side_by_side<T, 1, 4>(a, begin, end);
  if (a.rows == 1) begin = side_by_side<T, 1, 2>(a, begin, end);
  if (a.rows == 2) begin = side_by_side<T, 2, 2>(a, begin, end);
  const int blocks = (a.rows + MAX_ROWS - 1) / MAX_ROWS;
  for (; begin < end; ++begin) {
    for (int b = 0; b < blocks; ++b) {
      const int row = int(int64_t(a.rows) * b / blocks), rows = int(int64_t(a.rows) * (b + 1) / blocks) - row;
      const char* ahead = fetch_ahead(a, bytes, begin, end, b, blocks);
      const int64_t ahead_step = step / blocks;
      with_rows(rows, [&](auto r) { tile<T, r, 1>(a, begin, row, ahead, ahead_step); });
    }
  }
}
