// The body of a level: define LEVEL (its namespace and name), then include this once.
#include "products.h"

namespace specinfer {
namespace LEVEL {

#include "attention.h"

// `n` values, padded with zeros; the weight's padding is zero, too.
void rms_norm(const float* x, const float* weight, float* out, int n, int padded, float eps) {
  F a = splat(0.0f), b = splat(0.0f);
  for (int i = 0; i < padded; i += 2 * W) {
    a = fma(load(x + i), load(x + i), a);
    b = fma(load(x + i + W), load(x + i + W), b);
  }
  const F inverse = splat(1.0f / __builtin_sqrtf(sum(a + b) / float(n) + eps));
  for (int i = 0; i < padded; i += W) store(out + i, load(x + i) * inverse * load(weight + i));
}

// Padded likewise. `out` may be `x`.
void layer_norm(const float* x, const float* weight, const float* bias, float* out, int n, int padded, float eps) {
  F a = splat(0.0f), b = splat(0.0f);
  for (int i = 0; i < padded; i += 2 * W) {
    a = a + load(x + i);
    b = b + load(x + i + W);
  }
  const F mean = splat(sum(a + b) / float(n));
  for (int i = 0; i < padded; i += W) store(out + i, load(x + i) - mean);
  for (int i = n; i < padded; ++i) out[i] = 0.0f;
  a = b = splat(0.0f);
  for (int i = 0; i < padded; i += 2 * W) {
    a = fma(load(out + i), load(out + i), a);
    b = fma(load(out + i + W), load(out + i + W), b);
  }
  const F inverse = splat(1.0f / __builtin_sqrtf(sum(a + b) / float(n) + eps));
  for (int i = 0; i < padded; i += W) store(out + i, fma(load(out + i) * inverse, load(weight + i), load(bias + i)));
}

// A head may be shorter than a register, but is a multiple of 8.
void head_norm(float* x, const float* weight, int heads, int head_dim, float eps) {
  for (int h = 0; h < heads; ++h, x += head_dim) {
    float square[8] = {};
    for (int i = 0; i < head_dim; i += 8)
      for (int lane = 0; lane < 8; ++lane) square[lane] += x[i + lane] * x[i + lane];
    float total = 0.0f;
    for (float s : square) total += s;
    const float inverse = 1.0f / __builtin_sqrtf(total / float(head_dim) + eps);
    for (int i = 0; i < head_dim; ++i) x[i] = x[i] * inverse * weight[i];
  }
}

// In place; the sign of the rotated first half is in `sine`.
void rotate(float* x, int heads, int head_dim, const float* cosine, const float* sine) {
  const int half = head_dim / 2;
  for (int h = 0; h < heads; ++h, x += head_dim)
    for (int i = 0; i < half; ++i) {
      const float a = x[i], b = x[i + half];
      x[i] = a * cosine[i] + b * sine[i];
      x[i + half] = b * cosine[i + half] + a * sine[i + half];
    }
}

void to_kv(const float* x, void* out, int64_t n, Type type) {
  if (type == Type::f32) {
    std::memcpy(out, x, 4 * n);
    return;
  }
  for (int64_t i = 0; i < n; ++i) static_cast<uint16_t*>(out)[i] = to_bf16(x[i]);
}

}  // namespace LEVEL
}  // namespace specinfer
