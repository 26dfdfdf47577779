// What launches share on the host: kernels' attributes, and errors until somebody takes them.
#ifndef SINKHORN_KERNELS_CUDA_LAUNCH_H_
#define SINKHORN_KERNELS_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

namespace sinkhorn {
namespace cuda {

// Before a launch that needs the attribute to be `number` or more. Attributes are the kernel's, not the calling
// thread's: were it what each launch takes, another thread's smaller one could come in between.
void RaiseAttribute(const void* kernel, cudaFuncAttribute attribute, int number);
template <typename... Parameters>
inline void RaiseAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute, int number) {
  RaiseAttribute(reinterpret_cast<const void*>(kernel), attribute, number);
}

// The error of the calling thread's first launch that was refused, and so did not run, since it was last taken:
// launches, and copies that they read, keep theirs here; whoever enqueues a number of them takes it at the end.
// cudaGetLastError will not do: a later call that succeeds, such as cudaFuncSetAttribute, makes it forget.
void KeepLaunchError(cudaError_t error);
cudaError_t TakeLaunchError();

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_LAUNCH_H_
