// Compiled for the target's baseline.
#define LEVEL portable
#include "level.h"

namespace specinfer {
const Kernels& portable_kernels() {
  static const Kernels kernels{"portable", portable::PANEL, portable::gemm, portable::quantize, portable::attention,
                               portable::join, portable::rms_norm, portable::layer_norm, portable::head_norm,
                               portable::rotate, portable::to_kv};
  return kernels;
}
}  // namespace specinfer
