// A model's weights, packed once as a level's kernels want them, in one block of memory.
#pragma once
#include <string>
#include <vector>

#include "packing.h"

namespace specinfer {

struct Shape {
  int hidden, layers, heads, kv_heads, head_dim, intermediate, vocab;
  float eps;
  bool tied;

  int padded_hidden(int panel) const { return (hidden + panel - 1) / panel * panel; }
};

struct Layer {
  float* input_norm;
  float* post_norm;
  Linear qkv, out, gate_up, down;
};

class Weights {
 public:
  // types: of qkv, out, gate_up and down of each layer, of the head and, unless that is tied, of the embedding.
  Weights(const Shape& shape, const std::vector<Type>& types, const Kernels& kernels);
  ~Weights();
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  // One tensor of the checkpoint, [rows, columns] or [rows]. `layer` is ignored where there is none.
  void set(const std::string& name, int layer, const void* data, Type type, int64_t rows, int64_t columns);
  void set_bias(const std::string& name, int layer, const float* data, int64_t rows);
  void set_norm(const std::string& name, int layer, const float* data, int64_t size);

  void embed(int64_t token, float* out) const;  // [padded_hidden]
  int64_t bytes() const { return used_; }
  void check_complete() const;

  Shape shape;
  const Kernels& kernels;
  std::vector<Layer> layers;
  Linear head, embedding;  // the embedding is empty where the head is tied to it
  float* final_norm = nullptr;

 private:
  struct Place {
    Linear* linear;
    int column, outputs, inputs;
    int stride, parity;  // panel p of the tensor is panel p * stride + parity of the layer
  };
  Place place(const std::string& name, int layer);
  void* take(int64_t bytes);

  char* map_ = nullptr;
  char* block_ = nullptr;  // in it, from a whole huge page on
  int64_t size_ = 0, used_ = 0, mapped_ = 0;
  int64_t missing_;        // weights that are not set yet
};

}  // namespace specinfer
