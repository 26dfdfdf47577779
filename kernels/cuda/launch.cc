#include "kernels/cuda/launch.h"

#include <map>
#include <mutex>
#include <tuple>
#include <utility>

namespace sinkhorn {
namespace cuda {
namespace {

// The greatest number that an attribute has been set to, by kernel and device.
struct Attributes {
  std::mutex mutex;
  std::map<std::tuple<const void*, cudaFuncAttribute, int>, int> set;
};
Attributes& AllAttributes() {
  static auto* const attributes = new Attributes;
  return *attributes;
}

thread_local cudaError_t refused_launch = cudaSuccess;

}  // namespace

void RaiseAttribute(const void* kernel, cudaFuncAttribute attribute, int number) {
  int device = 0;
  (void)cudaGetDevice(&device);
  Attributes& attributes = AllAttributes();
  const std::lock_guard<std::mutex> lock(attributes.mutex);
  int& before = attributes.set[{kernel, attribute, device}];
  if (number > before && cudaFuncSetAttribute(kernel, attribute, number) == cudaSuccess) before = number;
}

void KeepLaunchError(cudaError_t error) {
  if (refused_launch == cudaSuccess) refused_launch = error;
}

cudaError_t TakeLaunchError() { return std::exchange(refused_launch, cudaSuccess); }

}  // namespace cuda
}  // namespace sinkhorn
