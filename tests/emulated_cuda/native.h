// Takes the place of kernels/cuda/native.cuh (compilers are told to include it first): the same functions, for a
// processor.
#ifndef SINKHORN_KERNELS_CUDA_NATIVE_CUH_
#define SINKHORN_KERNELS_CUDA_NATIVE_CUH_

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <immintrin.h>

#include <chrono>

namespace sinkhorn {
namespace cuda {

template <typename... Parameters, typename... Arguments>
inline cudaError_t LaunchNative(void (*kernel)(Parameters...), dim3 blocks, int threads, size_t smem_bytes,
                                cudaStream_t, const Arguments&... arguments) {
  cudaLaunchConfig_t config;
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = smem_bytes;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

inline char* DynamicShared() { return emulated_cuda::SharedMemory(); }
inline float* DynamicFloats() { return reinterpret_cast<float*>(emulated_cuda::SharedMemory()); }

// Shared memory is the program's own: from the dynamic part it is less than 2 GiB to the rest.
inline uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(static_cast<const char*>(p) - emulated_cuda::SharedMemory());
}
inline char* SharedPlace(uint32_t address) { return emulated_cuda::SharedMemory() + static_cast<int32_t>(address); }

// ---- Tensor cores ---------------------------------------------------------------------------------------------------

struct MatricesRequest {
  const void* row;
  uint32_t* registers;
};
inline void LoadMatrices(const void* row, uint32_t (&r)[4]) {
  MatricesRequest request{row, r};
  emulated_cuda::Together<MatricesRequest>(0xffffffffu, &request, [](MatricesRequest* const* lanes, unsigned) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int k = 0; k < 4; ++k) {
        const char* const from = static_cast<const char*>(lanes[8 * k + lane / 4]->row);
        std::memcpy(&lanes[lane]->registers[k], from + 4 * (lane % 4), 4);
      }
    }
  });
}

struct ProductRequest {
  const uint32_t* a;
  uint32_t b[2];
  float* c;
};
// By the processor's instruction: of C++'s conversion to double GCC makes a call.
inline float HalfOf(uint32_t word, int which) { return _cvtsh_ss(static_cast<uint16_t>(word >> 16 * which)); }
inline void MultiplyHalves(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4]) {
  ProductRequest request{a, {b0, b1}, c};
  emulated_cuda::Together<ProductRequest>(0xffffffffu, &request, [](ProductRequest* const* lanes, unsigned) {
    using Four = double __attribute__((vector_size(32)));  // One by one these sums are most of a test's time.
    double left[16][16];
    Four right[16][2], sums[16][2];
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4, pair = 2 * (lane % 4);
      for (int e = 0; e < 2; ++e) {
        for (int q = 0; q < 4; ++q) left[row + 8 * (q % 2)][pair + e + 8 * (q / 2)] = HalfOf(lanes[lane]->a[q], e);
        for (int q = 0; q < 2; ++q) right[pair + e + 8 * q][row / 4][row % 4] = HalfOf(lanes[lane]->b[q], e);
        for (int q = 0; q < 2; ++q) sums[row + 8 * q][pair / 4][pair % 4 + e] = lanes[lane]->c[2 * q + e];
      }
    }
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < 16; ++k) {
        sums[row][0] += left[row][k] * right[k][0];
        sums[row][1] += left[row][k] * right[k][1];
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4, pair = 2 * (lane % 4);
      for (int q = 0; q < 4; ++q) {
        lanes[lane]->c[q] = static_cast<float>(sums[row + 8 * (q / 2)][pair / 4][pair % 4 + q % 2]);
      }
    }
  });
}

// ---- Copies to shared memory: done at once --------------------------------------------------------------------------

inline void CopyAsync16(uint32_t shared, const void* global) { std::memcpy(SharedPlace(shared), global, 16); }
inline void CopyAsync16(void* shared, const void* global) { std::memcpy(shared, global, 16); }
inline void CommitCopies() {}
template <int kGroups>
inline void WaitForCopies() {}
inline void FetchAsync16(uint32_t shared, const void* global) { CopyAsync16(shared, global); }
inline void FetchAsync4(uint32_t shared, const void* global) { std::memcpy(SharedPlace(shared), global, 4); }
inline void WaitForFetches() {}

// ---- Special functions ----------------------------------------------------------------------------------------------

inline float Flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }
inline float FastExp2(float x) { return Flushed(std::exp2(Flushed(x))); }
inline float FastReciprocal(float x) { return Flushed(1 / Flushed(x)); }
inline double FastReciprocal(double x) {  // As rough as the device's.
  return __longlong_as_double(__double_as_longlong(1 / x) & ~0xffffffffll);
}
inline float FastRoot(float x) { return std::sqrt(x); }

// ---- Threads --------------------------------------------------------------------------------------------------------

template <int kThreads>
inline void SyncSome(int name) {
  emulated_cuda::SyncNamed(name, kThreads);
}
inline unsigned CountUp(unsigned* counter) { return (*counter)++; }
inline unsigned Counted(const unsigned* counter) { return *counter; }
inline int Opaque(int x) { return x; }
inline double Opaque(double x) { return x; }
template <class T>
inline T* Opaque(T* x) {
  return x;
}
inline unsigned long long GlobalNanoseconds() {
  return static_cast<unsigned long long>(std::chrono::steady_clock::now().time_since_epoch().count());
}
inline void Trap() { emulated_cuda::LoseDevice(); }

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_NATIVE_CUH_
