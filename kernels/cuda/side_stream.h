// A second stream beside one, for what may run beside what is on that. Private to those who make a LaunchContext.
#ifndef SINKHORN_KERNELS_CUDA_SIDE_STREAM_H_
#define SINKHORN_KERNELS_CUDA_SIDE_STREAM_H_

#include <cuda_runtime_api.h>

namespace sinkhorn {
namespace cuda {

class SideStream {
 public:
  SideStream() = default;
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  ~SideStream() {
    if (event_ != nullptr) (void)cudaEventDestroy(event_);
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }

  // On the calling thread's device, beside `main`. Of the same priority: a higher one gains nothing, and holds up what
  // other lanes have.
  cudaError_t Init(cudaStream_t main) {
    main_ = main;
    const cudaError_t error = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
    return error == cudaSuccess ? cudaEventCreateWithFlags(&event_, cudaEventDisableTiming) : error;
  }
  cudaStream_t get() const { return stream_; }
  // LaunchContext's.
  cudaError_t Fork() { return Follow(main_, stream_); }
  cudaError_t Join() { return Follow(stream_, main_); }

 private:
  // What is enqueued on `then` from now on waits for what is on `first`.
  cudaError_t Follow(cudaStream_t first, cudaStream_t then) {
    const cudaError_t error = cudaEventRecord(event_, first);
    return error == cudaSuccess ? cudaStreamWaitEvent(then, event_, 0) : error;
  }

  cudaStream_t main_ = nullptr, stream_ = nullptr;
  cudaEvent_t event_ = nullptr;
};

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_SIDE_STREAM_H_
