// What the programs that time a GPU do where CUDA reports an error: say what failed, and leave.
#ifndef SINKHORN_TESTS_BENCH_GPU_CHECK_H_
#define SINKHORN_TESTS_BENCH_GPU_CHECK_H_

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

namespace sinkhorn {

inline void Check(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", doing, cudaGetErrorString(error));
  std::exit(1);
}

}  // namespace sinkhorn

#endif  // SINKHORN_TESTS_BENCH_GPU_CHECK_H_
