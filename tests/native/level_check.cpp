// Linear layers at every level that this CPU has: a row's bits are its own whatever rows are beside it, and they are the
// portable level's, exactly for quantised weights and up to rounding for others. Needs no threads and no system.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "tensors.h"

using namespace specinfer;

struct Layer {
  const Kernels& kernels;
  Linear linear;
  Store store;
  std::vector<char> data;
  std::vector<float> bias;

  Layer(const Kernels& k, Type type, int outputs, int inputs, Store s, const std::vector<char>& from) : kernels(k), store(s) {
    const int half = outputs / 2;  // gated: so many gates, whose panels alternate with those of the others
    linear.type = type == Type::bf16 ? k.bf16 : type;
    linear.inputs = inputs;
    linear.outputs = outputs;
    linear.panels = s == Store::gated ? 2 * ((half + k.panel - 1) / k.panel) : (outputs + k.panel - 1) / k.panel;
    data.resize(linear.panels * panel_bytes(linear.type, inputs, k.panel));
    bias.assign(linear.panels * k.panel, 0.25f);
    linear.data = data.data();
    linear.bias = bias.data();
    const int64_t row = int64_t(from.size()) / outputs;
    for (int64_t i = 0; i < outputs; ++i) {
      const int64_t at = s == Store::gated ? i % half : i;
      const int64_t panel = s == Store::gated ? at / k.panel * 2 + i / half : at / k.panel;
      pack(linear, k.panel, panel, at % k.panel, from.data() + i * row, is_quantized(type) ? type : Type::f32);
    }
  }

  int columns() const { return store == Store::gated ? linear.outputs / 2 : linear.outputs; }

  std::vector<float> operator()(const float* x, int rows) const {
    int64_t stride = 4 * linear.inputs;
    std::vector<char> converted;
    const void* from = x;
    if (converts_rows(linear.type)) {
      stride = converted_row_bytes(linear.type, linear.inputs);
      converted.resize(rows * stride);
      for (int r = 0; r < rows; ++r)
        kernels.quantize(x + int64_t(r) * linear.inputs, linear.inputs, linear.type, converted.data() + r * stride);
      from = converted.data();
    }
    // Gated rows go by whole panels, others end where they end.
    const int width = store == Store::gated ? linear.panels / 2 * kernels.panel : columns();
    std::vector<float> out(rows * width, 0.5f), result;
    kernels.gemm({&linear, from, stride, rows, out.data(), width, width, store}, 0, linear.panels);
    for (int r = 0; r < rows; ++r) result.insert(result.end(), out.begin() + r * width, out.begin() + r * width + columns());
    return result;
  }
};

static void check(bool ok, const char* what, const Layer& layer) {
  if (ok) return;
  std::printf("%s: %s of type %d, store %d\n", what, layer.kernels.name, int(layer.linear.type), int(layer.store));
  std::exit(1);
}

static void run(const Kernels& kernels, Type type, int outputs, int inputs, Store how) {
  constexpr int ROWS = 26;
  const std::vector<char> weights = tensor(type, outputs, inputs);
  const Layer layer(kernels, type, outputs, inputs, how, weights), reference(portable_kernels(), type, outputs, inputs, how, weights);
  const std::vector<float> x = uniform(ROWS * inputs), all = layer(x.data(), ROWS);
  for (int first = 0; first < ROWS; first += 5)
    for (int rows = 1; rows <= ROWS - first; ++rows)
      check(!std::memcmp(layer(x.data() + first * inputs, rows).data(), all.data() + first * layer.columns(),
                         4 * rows * layer.columns()), "a row's bits depend on others", layer);
  std::vector<float> same = x;
  if (layer.linear.type == Type::bf16_pairs)
    for (float& v : same) v = from_bits(uint32_t(to_bf16(v)) << 16);
  const std::vector<float> expected = reference(same.data(), ROWS);
  const bool exact = is_quantized(type) && how != Store::gated;  // a gate's exponential is fused where it can be
  for (size_t i = 0; i < expected.size(); ++i)
    check(exact ? all[i] == expected[i] : std::fabs(all[i] - expected[i]) < 1e-4f * (1.0f + std::fabs(expected[i])),
          "not the portable level's", layer);
}

int main() {
  for (const char* name : {"portable", "avx2", "avx512", "avx512_bf16"}) {
    const Kernels* kernels = nullptr;
    try {
      kernels = &choose_kernels(name);
    } catch (const std::invalid_argument& error) {
      std::printf("%s\n", error.what());
      continue;
    }
    for (Type type : {Type::f32, Type::bf16, Type::q8_0, Type::q4_0, Type::q4_1, Type::q4_k, Type::q6_k})
      for (Store how : {Store::plain, Store::add, Store::gated}) {
        for (int outputs : {34, 96, 160}) run(*kernels, type, outputs, type >= Type::q4_k ? 512 : 64, how);
        if (type < Type::f16) run(*kernels, type, 50, 23, how);
      }
    std::printf("%s ok\n", name);
  }
  std::printf("best: %s\n", choose_kernels("").name);
  return 0;
}
