// What kernels/cuda uses of CUDA, for a processor: kernels are functions, a block's threads are run one after another
// (../block.h), streams do at once what they are asked for (../runtime.cc). Device code is compiled as for compute
// capability 8.0, whose answers an NVIDIA A100 would give but for the roundings of its special functions.
#ifndef SINKHORN_TESTS_EMULATED_CUDA_CUDA_RUNTIME_H_
#define SINKHORN_TESTS_EMULATED_CUDA_CUDA_RUNTIME_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include "tests/emulated_cuda/block.h"

// ---- Words of the language ------------------------------------------------------------------------------------------

#define __CUDACC__ 1  // Device code is wanted.
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__  // After the C++ library, whose attributes have the same name.
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
// One block runs at a time (RunGrid), so all may have the same.
#define __shared__ static

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

struct dim3 {
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  unsigned x, y, z;
};

// ---- Functions of the device ----------------------------------------------------------------------------------------

using std::isfinite;
using std::isinf;
using std::isnan;

// Of two kinds of integers: the common one, as CUDA's.
template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  const std::common_type_t<A, B> x = a, y = b;
  return y < x ? y : x;
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  const std::common_type_t<A, B> x = a, y = b;
  return x < y ? y : x;
}

template <typename To, typename From>
inline To EmulatedBits(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline unsigned __float_as_uint(float x) { return EmulatedBits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return EmulatedBits<float>(x); }
inline long long __double_as_longlong(double x) { return EmulatedBits<long long>(x); }
inline double __longlong_as_double(long long x) { return EmulatedBits<double>(x); }
inline int __double2hiint(double x) { return static_cast<int>(EmulatedBits<uint64_t>(x) >> 32); }
inline double __hiloint2double(int high, int low) {
  return EmulatedBits<double>(static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low));
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

template <typename T>
inline T __ldg(const T* p) {
  return *p;
}
template <typename T>
inline T __ldcg(const T* p) {
  return *p;
}
template <typename T>
inline T __ldcs(const T* p) {
  return *p;
}
template <typename T>
inline void __stcs(T* p, T value) {
  *p = value;
}
inline void __threadfence() {}

// ---- Threads of a block and of a warp -------------------------------------------------------------------------------

inline void __syncthreads(int line = __builtin_LINE()) { sinkhorn::emulated_cuda::SyncBlock(false, line); }
inline int __syncthreads_and(int predicate, int line = __builtin_LINE()) {
  return sinkhorn::emulated_cuda::SyncBlock(predicate != 0, line) == static_cast<int>(blockDim.x);
}
inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
  return sinkhorn::emulated_cuda::SyncBlock(predicate != 0, line) != 0;
}

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  int none = 0;
  sinkhorn::emulated_cuda::Together<int>(mask, &none, [](int* const*, unsigned) {});
}

struct EmulatedPredicate {
  bool mine;
  unsigned all;
};
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  EmulatedPredicate request{predicate != 0, 0};
  sinkhorn::emulated_cuda::Together<EmulatedPredicate>(mask, &request,
                                                       [](EmulatedPredicate* const* lanes, unsigned present) {
                                                         unsigned all = 0;
                                                         for (int l = 0; l < 32; ++l)
                                                           all |= (present >> l & 1 && lanes[l]->mine ? 1u : 0u) << l;
                                                         for (int l = 0; l < 32; ++l) {
                                                           if (present >> l & 1) lanes[l]->all = all;
                                                         }
                                                       });
  return request.all;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

template <typename T>
struct EmulatedShuffle {
  T mine;
  int source;
  T theirs;
};
// From lane `source`; what a lane that is not there has is undefined: as poison it shows.
template <typename T>
inline T EmulatedExchange(unsigned mask, T value, int source) {
  EmulatedShuffle<T> request{value, source, value};
  sinkhorn::emulated_cuda::Together<EmulatedShuffle<T>>(mask, &request,
                                                        [](EmulatedShuffle<T>* const* lanes, unsigned present) {
                                                          for (int l = 0; l < 32; ++l) {
                                                            if (!(present >> l & 1)) continue;
                                                            if (present >> lanes[l]->source & 1) {
                                                              lanes[l]->theirs = lanes[lanes[l]->source]->mine;
                                                            } else {
                                                              std::memset(&lanes[l]->theirs, 0xff, sizeof(T));
                                                            }
                                                          }
                                                        });
  return request.theirs;
}
inline int EmulatedLane() { return static_cast<int>(threadIdx.x % 32); }
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return EmulatedExchange(mask, value, EmulatedLane() / width * width + source % width);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int other, int width = 32) {
  const int lane = EmulatedLane(), source = lane ^ other;
  return EmulatedExchange(mask, value, source / width <= lane / width ? source : lane);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, int by, int width = 32) {
  const int lane = EmulatedLane();
  return EmulatedExchange(mask, value, lane % width + by < width ? lane + by : lane);
}

template <typename Op>
inline unsigned EmulatedReduction(unsigned mask, unsigned value) {
  unsigned request = value;
  sinkhorn::emulated_cuda::Together<unsigned>(mask, &request, [](unsigned* const* lanes, unsigned present) {
    unsigned all = 0;
    for (int l = 0; l < 32; ++l) {
      if (present >> l & 1) all = Op()(all, *lanes[l]);
    }
    for (int l = 0; l < 32; ++l) {
      if (present >> l & 1) *lanes[l] = all;
    }
  });
  return request;
}
struct EmulatedMax {
  unsigned operator()(unsigned a, unsigned b) const { return a < b ? b : a; }
};
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) { return EmulatedReduction<EmulatedMax>(mask, value); }
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  return EmulatedReduction<std::bit_or<unsigned>>(mask, value);
}

// ---- The runtime ----------------------------------------------------------------------------------------------------

#define CUDART_VERSION 13000

enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidValue,
  cudaErrorMemoryAllocation,
  cudaErrorInsufficientDriver,
  cudaErrorNoDevice,
  cudaErrorNotReady,
  cudaErrorLaunchFailure,
  cudaErrorUnknown,
};
using cudaError = cudaError_t;
const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();

struct cudaUUID_t {
  char bytes[16];
};
struct cudaDeviceProp {
  char name[256];
  cudaUUID_t uuid;
  int major, minor, multiProcessorCount, l2CacheSize;
  size_t sharedMemPerBlockOptin, totalGlobalMem;
};
enum cudaDeviceAttr {
  cudaDevAttrMemoryClockRate,
  cudaDevAttrGlobalMemoryBusWidth,
  cudaDevAttrUnifiedAddressing,
  cudaDevAttrCooperativeLaunch,
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin
};
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int* device);

cudaError_t cudaMemGetInfo(size_t* free, size_t* total);
constexpr unsigned cudaHostAllocPortable = 1, cudaHostAllocMapped = 2;
cudaError_t EmulatedAllocate(void** memory, size_t bytes);
template <typename T>
inline cudaError_t cudaMalloc(T** memory, size_t bytes) {
  return EmulatedAllocate(reinterpret_cast<void**>(memory), bytes);
}
template <typename T>
inline cudaError_t cudaHostAlloc(T** memory, size_t bytes, unsigned) {
  return EmulatedAllocate(reinterpret_cast<void**>(memory), bytes);
}
cudaError_t cudaFree(void* memory);
cudaError_t cudaFreeHost(void* memory);

struct CUstream_st;
struct CUevent_st;
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventBlockingSync = 1,
                   cudaEventDisableTiming = 2;
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDefault };
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t event, unsigned) { return cudaEventQuery(event); }
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t stream);

// There is none.
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
constexpr int cudaEnableDefault = 0;
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void**, unsigned, int,
                                                    cudaDriverEntryPointQueryResult* result) {
  *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

struct cudaFuncAttributes {
  int binaryVersion = 80, ptxVersion = 80;
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout,
  cudaFuncAttributeNonPortableClusterSizeAllowed
};
constexpr int cudaSharedmemCarveoutMaxShared = 100;
template <typename Kernel>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
  *attributes = cudaFuncAttributes();
  return cudaSuccess;
}
template <typename Kernel>
inline cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeCooperative,
  cudaLaunchAttributeProgrammaticStreamSerialization
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
    int cooperative;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};
// The error is its caller's alone: cudaGetLastError may have forgotten it by the time it is asked; here it has.
template <typename... Parameters, typename... Arguments>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                                      const Arguments&... arguments) {
  const dim3& grid = config->gridDim;
  if (config->dynamicSmemBytes > sinkhorn::emulated_cuda::kMostSharedBytes) return cudaErrorInvalidValue;
  sinkhorn::emulated_cuda::RunGrid({grid.x, grid.y, grid.z}, config->blockDim.x, config->dynamicSmemBytes,
                                   [&] { kernel(arguments...); });
  return cudaSuccess;
}
template <typename Kernel>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}
template <typename Kernel>
inline cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel*, const cudaLaunchConfig_t*) {
  *clusters = 0;
  return cudaErrorInvalidValue;
}

#endif  // SINKHORN_TESTS_EMULATED_CUDA_CUDA_RUNTIME_H_
