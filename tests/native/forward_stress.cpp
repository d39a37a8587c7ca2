// Forwards of tiny models in every type of weights, at every level: the rows of a tree by one thread and by three
// agree, and the sanitisers find nothing.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>

#include "forward.h"
#include "tensors.h"

using namespace specinfer;

static void check(bool ok, const char* what) {
  if (ok) return;
  std::puts(what);
  std::abort();
}

static void run(const Kernels& kernels, Type type, Type v_type, const Shape& s, Type kv_type = Type::f32) {
  std::vector<Type> types(5 * s.layers + 1 + !s.tied + s.features, type);
  for (int i = 0; i < s.layers; ++i) types[5 * i + 1] = v_type;
  Weights weights(s, types, kernels);
  auto set = [&](const char* name, int layer, int64_t rows, int64_t columns) {
    const Type of = *name == 'v' ? v_type : type;
    const std::vector<char> data = tensor(of, rows, columns);
    weights.set(name, layer, data.data(), is_quantized(of) ? of : Type::f32, rows, columns);
  };
  auto norm = [&](const char* name, int layer, int size) {
    const std::vector<float> weight = uniform(size), bias = uniform(size);
    weights.set_norm(name, layer, weight.data(), s.layer_norm ? bias.data() : nullptr, size);
  };
  const int q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
  for (int i = 0; i < s.layers; ++i) {
    set("q", i, q, s.hidden);
    set("k", i, kv, s.hidden);
    set("v", i, kv, s.hidden);
    set("out", i, s.hidden, q);
    if (s.inner == Store::gated) set("gate", i, s.intermediate, s.hidden);
    set("up", i, s.intermediate, s.hidden);
    set("down", i, s.hidden, s.intermediate);
    norm("input_norm", i, s.hidden);
    norm("post_norm", i, s.hidden);
    if (s.head_norms) {
      norm("q_norm", i, s.head_dim);
      norm("k_norm", i, s.head_dim);
    }
    weights.set_bias("down", i, uniform(s.hidden).data(), s.hidden);
  }
  norm("final_norm", -1, s.hidden);
  set("head", -1, s.head_size, s.hidden);
  if (!s.tied) set("embedding", -1, s.vocab, s.hidden);
  if (s.features) set("features", -1, s.hidden, 2 * s.hidden);
  weights.check_complete();

  constexpr int64_t SLOTS = 300, CONTEXT = 270, NODES = 13;
  const std::vector<float> cosine = uniform(SLOTS * s.head_dim), sine = uniform(SLOTS * s.head_dim);
  const std::vector<float> learned = uniform(SLOTS * s.hidden);
  const Positions rotary{cosine.data(), sine.data(), nullptr, SLOTS}, table{nullptr, nullptr, learned.data(), SLOTS};
  std::vector<int64_t> slots(SLOTS), chain(CONTEXT), parents(NODES), tokens(SLOTS), rows(NODES);
  for (int64_t i = 0; i < SLOTS; ++i) slots[i] = (i * 7) % SLOTS, tokens[i] = int64_t(rng() % s.vocab);
  for (int64_t i = 0; i < CONTEXT; ++i) chain[i] = i - 1;
  for (int64_t i = 0; i < NODES; ++i) parents[i] = i ? int64_t(rng() % i) : -1, rows[i] = i;
  const std::vector<float> given = uniform(SLOTS * s.hidden);
  std::vector<float> logits[2];
  for (int threads : {1, 3}) {
    std::vector<std::vector<char>> memory;
    KvPool pool{kv_type, SLOTS, {}, {}};
    for (int i = 0; i < 2 * s.layers; ++i) memory.emplace_back(SLOTS * kv * (kv_type == Type::f32 ? 4 : 2));
    for (int i = 0; i < s.layers; ++i) {
      pool.keys.push_back(memory[2 * i].data());
      pool.values.push_back(memory[2 * i + 1].data());
    }
    // Of a draft, its own embedding stands for the target's; its nodes' rows are its own.
    std::vector<float> read = given, kept(given.size());
    Features features{&weights, read.data(), slots[CONTEXT], SLOTS - 1, {kept.data()}};
    if (!s.features) features = {nullptr, nullptr, 0, 0, {kept.data()}};
    Forward forward(weights, pool, s.layer_norm ? table : rotary, features);
    Batch b{};
    const int64_t none = 0;
    b.context_slots = slots.data();
    b.context_lens = &none;
    b.span_lens = &CONTEXT;
    b.num_spans = 1;
    b.slots = slots.data();
    b.parents = chain.data();
    b.token_ids = tokens.data();
    b.num_rows = CONTEXT;
    b.last_layer = s.layers;
    weights.withhold(0);
    std::thread loader([&] { weights.release(0); });
    forward.run(b, shared_pool(threads));
    loader.join();
    std::vector<float>& out = logits[threads / 2];
    out.resize(NODES * s.head_size);
    b.num_context_slots = CONTEXT;
    b.context_lens = &CONTEXT;
    b.span_lens = &NODES;
    b.slots = slots.data() + CONTEXT;
    b.parents = parents.data();
    b.token_ids = tokens.data() + CONTEXT;
    b.num_rows = b.num_logits = NODES;
    b.logits_rows = rows.data();
    b.logits = out.data();
    forward.run(b, shared_pool(threads));
  }
  check(logits[0] == logits[1], "threads disagree");
}

int main() {
  std::vector<const Kernels*> levels;
  for (const char* name : {"portable", "avx2", "avx512", "avx512_bf16"}) try {
      levels.push_back(&choose_kernels(name));
    } catch (const std::invalid_argument&) {  // not on this CPU
    }
  for (const Kernels* kernels : levels)
    for (Type type : {Type::f32, Type::bf16, Type::q8_0, Type::q4_0, Type::q4_1, Type::q4_k, Type::q6_k})
      for (bool tied : {false, true}) {
        const Type v_type = tied || type == Type::q8_0 ? type : unit_inputs(type) == 32 ? Type::q8_0 : Type::q6_k;
        if (unit_inputs(type) == 32)
          run(*kernels, type, v_type, {64, 2, 4, 2, 16, 96, 45, 1e-5f, tied, tied ? 45 : 30, Store::gated, false, true, {300, 5}, tied});
        else
          run(*kernels, type, v_type, {256, 1, 4, 2, 64, 256, 45, 1e-5f, tied, 45, Store::gated, false, true, {300}}, Type::bf16);
        if (is_quantized(type)) continue;
        run(*kernels, type, type, {23, 1, 3, 1, 24, 29, 7, 1e-5f, tied, 7, Store::gated, false, false, {300}, tied});
        run(*kernels, type, type, {23, 1, 3, 3, 8, 29, 7, 1e-5f, tied, 7, tied ? Store::relu : Store::gelu, true, false, {300}});
      }
  std::puts("ok");
  std::fflush(stdout);
  _Exit(0);
}
