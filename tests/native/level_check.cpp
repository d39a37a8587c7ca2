// Linear layers at every level that this CPU has: a row's bits are its own whatever rows are beside it, and they are the
// portable level's, exactly for quantised weights and up to rounding for others. Attention likewise: a node's bits are
// those of its path alone, and near a softmax in double precision. Needs no threads and no system.
#include <algorithm>
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
    linear.type = k.kept(type);
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

// A tree below a context whose slots are scattered, and one K/V head for every two heads.
struct Attention {
  static constexpr int SLOTS = 420, NODES = 23;
  Type type;
  int dim, heads = 4, kv_heads = 2;
  int64_t window;
  std::vector<int64_t> order;
  std::vector<int> parents;
  std::vector<char> keys, values;
  std::vector<float> q;

  Attention(Type t, int d, int64_t w) : type(t), dim(d), window(w), q(uniform(NODES * heads * d)) {
    for (int i = 0; i < SLOTS; ++i) order.push_back(i * 11 % SLOTS);
    for (int i = 0; i < NODES; ++i) parents.push_back(i < 6 ? i - 1 : int(rng() % i));  // a chain, then a bush
    for (std::vector<char>* rows : {&keys, &values}) {
      const std::vector<float> x = uniform(SLOTS * kv_heads * dim);
      rows->resize(x.size() * (type == Type::f32 ? 4 : 2));
      portable_kernels().to_kv(x.data(), rows->data(), int64_t(x.size()), type);
    }
  }

  // Of `nodes`, each of which is preceded by its parent; by blocks of keys, too, the last first: the same bits.
  std::vector<float> operator()(const Kernels& kernels, int64_t context, const std::vector<int>& nodes, bool by_blocks) const {
    std::vector<int64_t> slots;
    std::vector<int32_t> depth, trunk, offset, path;
    std::vector<float> rows, out(nodes.size() * heads * dim), scratch(attention_scratch(dim) + 16);
    for (size_t i = 0; i < nodes.size(); ++i) {
      std::vector<int32_t> line;
      for (int at = nodes[i]; at >= 0; at = parents[at])
        for (size_t j = 0; j <= i; ++j)
          if (nodes[j] == at) line.insert(line.begin(), int32_t(j));
      slots.push_back(order[context + nodes[i]]);
      depth.push_back(int32_t(line.size()) - 1);
      int chain = 0;
      while (chain < int(line.size()) && line[chain] == chain) ++chain;
      trunk.push_back(chain);
      offset.push_back(int32_t(path.size()));
      path.insert(path.end(), line.begin() + chain, line.end());
      rows.insert(rows.end(), q.begin() + nodes[i] * heads * dim, q.begin() + (nodes[i] + 1) * heads * dim);
    }
    const SpanView span{order.data(), context, slots.data(), depth.data(), trunk.data(), offset.data(), path.data(), 0};
    const AttentionArgs args{type, keys.data(), values.data(), heads, kv_heads, dim, window, 0.2f, rows.data(), heads * dim,
                             out.data(), heads * dim};
    const int group = heads / kv_heads, queries = int(nodes.size()) * group;
    for (int h = 0; h < kv_heads; ++h)
      for (int begin = 0; begin < queries; begin += 10)
        kernels.attention(args, span, h, begin, std::min(queries, begin + 10), 0, nullptr, scratch.data());
    if (!by_blocks) return out;
    const std::vector<float> whole = out;
    const int blocks = int((context + int64_t(nodes.size()) - 1) / KEY_BLOCK) + 1;
    for (int h = 0; h < kv_heads; ++h)
      for (int begin = 0; begin < queries; begin += QUERY_BLOCK) {
        const int end = std::min(queries, begin + QUERY_BLOCK);
        const int64_t size = (end - begin) * attention_part(dim);
        std::vector<float> parts(blocks * size);
        for (int b = blocks - 1; b >= 0; --b)
          kernels.attention(args, span, h, begin, end, b, parts.data() + b * size, scratch.data());
        kernels.join(args, span, h, begin, end, blocks, parts.data(), scratch.data());
      }
    if (std::memcmp(whole.data(), out.data(), 4 * out.size())) {
      std::printf("attention of %s by blocks, head_dim %d, context %d\n", kernels.name, dim, int(context));
      std::exit(1);
    }
    return out;
  }

  // With values of a node that are infinite.
  Attention spoilt(int64_t context, int node) const {
    Attention copy = *this;
    const int64_t row = order[context + node] * kv_heads * dim;
    for (int64_t i = row; i < row + kv_heads * dim; ++i) {
      const float x = __builtin_inff();
      const uint16_t half = to_bf16(x);
      if (type == Type::f32)
        std::memcpy(copy.values.data() + 4 * i, &x, 4);
      else
        std::memcpy(copy.values.data() + 2 * i, &half, 2);
    }
    return copy;
  }

  bool sees(int node, int other) const {
    while (node > other) node = parents[node];
    return node == other;
  }

  double exact(int64_t context, int node, int head, int d) const {
    std::vector<int64_t> seen;
    for (int at = node; at >= 0; at = parents[at]) seen.insert(seen.begin(), order[context + at]);
    seen.insert(seen.begin(), order.begin(), order.begin() + context);
    double total = 0, sum = 0;
    for (size_t i = int64_t(seen.size()) > window ? seen.size() - window : 0; i < seen.size(); ++i) {
      const int64_t row = (seen[i] * kv_heads + head / (heads / kv_heads)) * dim;
      double score = 0;
      for (int j = 0; j < dim; ++j) score += double(q[(node * heads + head) * dim + j]) * element(keys.data(), type, row + j);
      total += std::exp(0.2 * score);
      sum += std::exp(0.2 * score) * element(values.data(), type, row + d);
    }
    return sum / total;
  }
};

static void attend(const Kernels& kernels, Type type, int dim, int64_t window) {
  const Attention attention(type, dim, window);
  std::vector<int> all;
  for (int i = 0; i < Attention::NODES; ++i) all.push_back(i);
  for (int64_t context : {0, 1, 31, 32, 61, 255, 380}) {
    const std::vector<float> together = attention(kernels, context, all, true);
    const int64_t row = attention.heads * dim;
    for (int spoilt : {5, 9, 22}) {
      const std::vector<float> beside = attention.spoilt(context, spoilt)(kernels, context, all, false);
      for (int node : all)
        if (!attention.sees(node, spoilt) && std::memcmp(&together[node * row], &beside[node * row], 4 * row)) {
          std::printf("attention of %s, head_dim %d, context %d, node %d beside %d\n", kernels.name, dim, int(context), node, spoilt);
          std::exit(1);
        }
    }
    for (int node : all) {
      std::vector<int> path;
      for (int at = node; at >= 0; at = attention.parents[at]) path.insert(path.begin(), at);
      const std::vector<float> alone = attention(kernels, context, path, node % 8 == 0);
      bool ok = !std::memcmp(&together[node * row], &alone[alone.size() - row], 4 * row);
      const int head = node % attention.heads;
      for (int d : {0, dim - 1})
        ok = ok && std::fabs(together[node * row + head * dim + d] - attention.exact(context, node, head, d)) < (type == Type::bf16 ? 1e-2 : 1e-5);
      if (ok) continue;
      std::printf("attention of %s, head_dim %d, context %d, node %d\n", kernels.name, dim, int(context), node);
      std::exit(1);
    }
  }
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
    for (Type type : {Type::f32, Type::bf16})
      for (int dim : {8, 32, 64, 96, 128})
        for (int64_t window : {40, 1000}) attend(*kernels, type, dim, window);
    std::printf("%s ok\n", name);
  }
  std::printf("best: %s\n", choose_kernels("").name);
  return 0;
}
