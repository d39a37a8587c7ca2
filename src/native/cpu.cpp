#include <stdexcept>
#include <string>

#include "kernels.h"

namespace specinfer {

struct Level {
  const char* name;
  bool (*is_here)();  // on this CPU, and enabled by the system
  const Kernels& (*kernels)();
};

#ifdef SPECINFER_X86
static bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

static bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}
#endif

// The best first.
static const Level LEVELS[] = {
#ifdef SPECINFER_X86
    {"avx512_bf16", has_avx512_bf16, avx512_bf16_kernels},
    {"avx512", has_avx512, avx512_kernels},
    {"avx2", has_avx2, avx2_kernels},
#endif
    {"portable", [] { return true; }, portable_kernels},
};

const Kernels& choose_kernels(const char* name) {
  const std::string wanted = name;
  for (const Level& level : LEVELS) {
    if (!wanted.empty() && wanted != level.name) continue;
    if (level.is_here()) return level.kernels();
    if (!wanted.empty()) throw std::invalid_argument("this CPU has no " + wanted);
  }
  throw std::invalid_argument("level '" + wanted + "' is not one of this build's");
}

}  // namespace specinfer
