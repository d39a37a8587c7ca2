// A model's weights, packed once as a level's kernels want them, in one block of memory.
#pragma once
#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include "packing.h"

namespace specinfer {

struct Shape {
  int hidden, layers, heads, kv_heads, head_dim, intermediate, vocab;
  float eps;
  bool tied;
  int head_size;               // rows of the head: fewer than vocab where a draft says a subset of what it reads
  Store inner = Store::gated;  // how the feed-forward's inner rows are made: gated, relu or gelu
  bool layer_norm = false;     // else RMSNorm
  bool head_norms = false;     // of each head of q and of k
  std::vector<int> windows;    // per layer the last positions that a token sees, itself included
  bool features = false;       // a draft that reads two rows beside each other: runtime/features.py

  int padded_hidden(int panel) const { return (hidden + panel - 1) / panel * panel; }
};

struct Norm {
  float* weight = nullptr;
  float* bias = nullptr;  // of LayerNorm; RMSNorm has none
};

struct Layer {
  Norm input_norm, post_norm, q_norm, k_norm;  // the last two of a head, where there are such
  Linear qkv, v, out, inner, down;             // v: empty where it is of the type of q and k; inner: up, or gate and up
};

class Weights {
 public:
  // types: of q and k, v, out, inner and down of each layer, of the head, unless that is tied of the
  // embedding, and of the features where they are read.
  Weights(const Shape& shape, const std::vector<Type>& types, const Kernels& kernels);
  ~Weights();
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  // One tensor of the checkpoint, [rows, columns] or [rows]. `layer` is ignored where there is none.
  void set(const std::string& name, int layer, const void* data, Type type, int64_t rows, int64_t columns);
  void set_bias(const std::string& name, int layer, const float* data, int64_t rows);
  // bias: of LayerNorm, else null.
  void set_norm(const std::string& name, int layer, const float* weight, const float* bias, int64_t size);

  void embed(int64_t token, float* out) const;  // [padded_hidden]
  int64_t bytes() const { return used_; }
  void check_complete() const;

  // A forward waits before a layer that is withheld until another thread, which sets its weights, releases it.
  void withhold(int layer);
  void release(int layer);
  void wait_for(int layer) const;

  Shape shape;
  const Kernels& kernels;
  std::vector<Layer> layers;
  Linear head, embedding;  // the embedding is empty where the head is tied to it
  Linear features;         // empty but for a draft that reads them
  Norm final_norm;

 private:
  struct Place {
    Linear* linear;
    int column, outputs, inputs;
    int stride, parity;  // panel p of the tensor is panel p * stride + parity of the layer
  };
  Place place(const std::string& name, int layer);
  Layer& layer_at(int index);
  void* take(int64_t bytes);

  char* map_ = nullptr;
  char* block_ = nullptr;  // in it, from a whole huge page on
  int64_t size_ = 0, used_ = 0, mapped_ = 0;
  int64_t missing_ = 0;    // rows of linears, and norms, that are not set yet
  mutable std::mutex withheld_mutex_;
  mutable std::condition_variable released_;
  std::vector<bool> withheld_;  // [layers]
};

}  // namespace specinfer
