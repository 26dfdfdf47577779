// The CPU backend: Highway SIMD kernels chosen at run time (AVX2, AVX-512, ...) on a fixed pool of threads.
#ifndef SINKHORN_KERNELS_CPU_CPU_BACKEND_H_
#define SINKHORN_KERNELS_CPU_CPU_BACKEND_H_

#include <cstdint>
#include <memory>

#include "kernels/backend.h"

namespace sinkhorn {

struct CpuBackendOptions {
  int threads = 0;  // 0: one per available core.
  // A transport problem whose scaled kernel matrix (n * m entries) fits this budget keeps it and iterates scalings on
  // it; larger ones recompute it tile by tile in memory O((n + m) dim).
  int64_t kernel_cache_bytes = int64_t{256} << 20;
};

std::unique_ptr<Backend> MakeCpuBackend(const CpuBackendOptions& options);

}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CPU_CPU_BACKEND_H_
