// y = x W^T over packed panels. One accumulator per (row, column), inputs in order: the bits of a row depend on
// nothing but the row. Included inside a level's namespace.

constexpr int PANEL = 2 * W;
constexpr int MAX_ROWS = 6;

template <bool BF16>
INLINE void panel_step(const char* p, F& lo, F& hi) {
  if (BF16) {
    const U w = *reinterpret_cast<const U*>(p);
    lo = (F)(w << 16);
    hi = (F)(w & 0xffff0000u);
  } else {
    lo = load(reinterpret_cast<const float*>(p));
    hi = load(reinterpret_cast<const float*>(p) + W);
  }
}

INLINE void store_panel(const GemmArgs& a, int panel, int row, F lo, F hi) {
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
  }
  store(out, lo);
  store(out + W, hi);
}

// R rows by P neighbouring panels. Every step also fetches `ahead`, moved on by `ahead_step`, of what comes next.
template <bool BF16, int R, int P>
void tile(const GemmArgs& a, int panel, int row, const char* ahead, int64_t ahead_step) {
  const int64_t n = a.linear->inputs, step = BF16 ? 2 * PANEL : 4 * PANEL;
  const char* w = a.linear->data + panel * step * n;
  const float* x[R];
  F lo[R][P], hi[R][P];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    x[r] = reinterpret_cast<const float*>(static_cast<const char*>(a.x) + (row + r) * a.x_stride);
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) lo[r][p] = hi[r][p] = splat(0.0f);
  }
  for (int64_t k = 0; k < n; ++k) {
    F wl[P], wh[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      panel_step<BF16>(w + p * step * n, wl[p], wh[p]);
      __builtin_prefetch(ahead + p * step * n, 0, 2);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F v = splat(x[r][k]);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        lo[r][p] = fma(v, wl[p], lo[r][p]);
        hi[r][p] = fma(v, wh[p], hi[r][p]);
      }
    }
    w += step;
    ahead += ahead_step;
  }
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store_panel(a, panel + p, row + r, lo[r][p], hi[r][p]);
}

template <bool BF16>
void gemm_of(const GemmArgs& a, int begin, int end) {
  const int64_t panel_bytes = int64_t(a.linear->inputs) * PANEL * (BF16 ? 2 : 4);
  const int64_t step = panel_bytes / a.linear->inputs;
  if (a.rows <= 2) {  // one row's two accumulators would wait for each other: two panels at once
    for (; begin + 2 <= end; begin += 2) {
      const char* next = a.linear->data + (begin + 2 < end ? begin + 2 : begin) * panel_bytes;
      if (a.rows == 1) tile<BF16, 1, 2>(a, begin, 0, next, step);
      if (a.rows == 2) tile<BF16, 2, 2>(a, begin, 0, next, step);
    }
  }
  const int blocks = (a.rows + MAX_ROWS - 1) / MAX_ROWS;
  for (; begin < end; ++begin) {
    const char* next = a.linear->data + (begin + 1 < end ? begin + 1 : begin) * panel_bytes;
    for (int b = 0; b < blocks; ++b) {
      const int row = int(int64_t(a.rows) * b / blocks), rows = int(int64_t(a.rows) * (b + 1) / blocks) - row;
      // Each block of rows fetches its share of the next panel.
      const char* ahead = next + panel_bytes * b / blocks;
      const int64_t ahead_step = step / blocks;
      switch (rows) {
        case 1: tile<BF16, 1, 1>(a, begin, row, ahead, ahead_step); break;
        case 2: tile<BF16, 2, 1>(a, begin, row, ahead, ahead_step); break;
        case 3: tile<BF16, 3, 1>(a, begin, row, ahead, ahead_step); break;
        case 4: tile<BF16, 4, 1>(a, begin, row, ahead, ahead_step); break;
        case 5: tile<BF16, 5, 1>(a, begin, row, ahead, ahead_step); break;
        case 6: tile<BF16, 6, 1>(a, begin, row, ahead, ahead_step); break;
      }
    }
  }
}
