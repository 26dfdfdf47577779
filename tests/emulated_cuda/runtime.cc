// One device, with an A100's capability and limits and few processors. Streams do at once what they are asked for.
#include <chrono>
#include <cstdlib>

#include "cuda_runtime.h"

using sinkhorn::emulated_cuda::DeviceIsLost;
using sinkhorn::emulated_cuda::kMostSharedBytes;

namespace {

constexpr size_t kDeviceBytes = size_t{4} << 30;

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t Report(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
// Of whatever a lost device is asked for.
cudaError_t Now() { return Report(DeviceIsLost() ? cudaErrorLaunchFailure : cudaSuccess); }

}  // namespace

const char* cudaGetErrorName(cudaError_t error) {
  static const char* const kNames[] = {
      "cudaSuccess",       "cudaErrorInvalidValue", "cudaErrorMemoryAllocation", "cudaErrorInsufficientDriver",
      "cudaErrorNoDevice", "cudaErrorNotReady",     "cudaErrorLaunchFailure",    "cudaErrorUnknown"};
  return kNames[error];
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
cudaError_t cudaGetLastError() {
  const cudaError_t error = DeviceIsLost() ? cudaErrorLaunchFailure : last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {"NVIDIA A100 as a processor emulates it", {}, 8, 0, 4, 40 << 20, kMostSharedBytes, kDeviceBytes};
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrUnifiedAddressing ? 1 : 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = kDeviceBytes;
  return Now();
}
cudaError_t EmulatedAllocate(void** memory, size_t bytes) {
  *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return Report(*memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }

struct CUstream_st {};
struct CUevent_st {
  std::chrono::steady_clock::time_point time;
};
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new CUstream_st;
  return Now();
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return Now(); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return Now();
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  event->time = std::chrono::steady_clock::now();
  return Now();
}
cudaError_t cudaEventQuery(cudaEvent_t) { return Now(); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return Now(); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return Now();
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  if (!DeviceIsLost()) std::memcpy(to, from, bytes);
  return Now();
}
cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t) {
  if (!DeviceIsLost()) std::memset(to, byte, bytes);
  return Now();
}
