#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace specinfer {

static bool has_avx2() {
#ifdef SPECINFER_X86
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

const Kernels& choose_kernels(const char* name) {
  const std::string wanted = name;
  if (wanted == "portable") return portable_kernels();
  if (wanted == "avx2" && !has_avx2()) throw std::invalid_argument("this CPU has no avx2");
#ifdef SPECINFER_X86
  if (wanted == "avx2" || (wanted.empty() && has_avx2())) return avx2_kernels();
#endif
  if (wanted.empty()) return portable_kernels();
  throw std::invalid_argument("level '" + wanted + "' is not known");
}

}  // namespace specinfer
