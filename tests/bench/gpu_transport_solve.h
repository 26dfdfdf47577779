// A row's problems on the device: tensors that are there already, and the transport family as the backend drives it,
// but by one thread, a slice after the other.
#ifndef SINKHORN_TESTS_BENCH_GPU_TRANSPORT_SOLVE_H_
#define SINKHORN_TESTS_BENCH_GPU_TRANSPORT_SOLVE_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/side_stream.h"
#include "tests/bench/gpu_check.h"
#include "tests/bench/gpu_transport_rows.h"

namespace sinkhorn {

// The first GPU, which is the thread's from then on. Without one: says so, and leaves.
inline DeviceInfo FirstDevice() {
  const absl::StatusOr<std::vector<DeviceInfo>> devices = ListDevices();
  if (!devices.ok() || devices->empty()) std::printf("no GPU\n"), std::exit(0);
  Check(cudaSetDevice(0), "cudaSetDevice");
  return (*devices)[0];
}

// Device memory that lives as long as this.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes) { Check(cudaMalloc(&data_, std::max<size_t>(bytes, 1)), "cudaMalloc"); }
  explicit DeviceBuffer(const std::vector<float>& values) : DeviceBuffer(values.size() * sizeof(float)) {
    Check(cudaMemcpy(data_, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~DeviceBuffer() { (void)cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// What a slice takes comes from three regions that are rewound after each.
class Context final : public cuda::LaunchContext {
 public:
  explicit Context(const DeviceInfo& device) : device_(device), scratch_(kBytes), uploads_(kBytes) {
    Check(cudaStreamCreate(&stream_), "cudaStreamCreate");
    Check(side_.Init(stream_), "a second stream");
    Check(cudaMallocHost(&visible_, kBytes), "cudaMallocHost");
  }
  ~Context() override {
    (void)cudaStreamDestroy(stream_);
    (void)cudaFreeHost(visible_);
  }
  const DeviceInfo& device() const override { return device_; }
  CUstream_st* stream() const override { return stream_; }
  CUstream_st* side_stream() const override { return side_.get(); }
  void Fork() override { Check(side_.Fork(), "Fork"); }
  void Join() override { Check(side_.Join(), "Join"); }
  // As the backend does.
  const void* Upload(const void* data, size_t bytes) override {
    if (bytes <= cuda::kMappedUploadBytes) {
      char* pinned = static_cast<char*>(visible_) + Take(&seen_, bytes);
      std::memcpy(pinned, data, bytes);
      return pinned;
    }
    void* at = static_cast<char*>(uploads_.data()) + Take(&uploaded_, bytes);
    Check(cudaMemcpyAsync(at, data, bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
    return at;
  }
  void* Scratch(size_t bytes) override { return static_cast<char*>(scratch_.data()) + Take(&scratched_, bytes); }
  void* HostVisible(size_t bytes, void** device_address) override {
    char* at = static_cast<char*>(visible_) + Take(&seen_, bytes);
    std::memset(at, 0, bytes);
    *device_address = at;
    return at;
  }
  void Rewind() { uploaded_ = scratched_ = seen_ = 0; }

 private:
  static constexpr size_t kBytes = size_t{16} << 20;
  static size_t Take(size_t* used, size_t bytes) {
    const size_t at = *used;
    *used += (bytes + 255) / 256 * 256;
    if (*used > kBytes) std::abort();
    return at;
  }
  DeviceInfo device_;
  cudaStream_t stream_ = nullptr;
  cuda::SideStream side_;
  DeviceBuffer scratch_, uploads_;
  void* visible_ = nullptr;
  size_t uploaded_ = 0, scratched_ = 0, seen_ = 0;
};

// Uniform or Gaussian numbers of a row, and room for its answers.
struct Inputs {
  explicit Inputs(const Row& row) {
    std::mt19937 random(7);
    const auto fill = [&](int64_t size) {
      std::vector<float> values(size);
      if (row.mixture) {
        std::normal_distribution<float> normal(0, 0.25f);
        for (int64_t i = 0; i < size; ++i) values[i] = normal(random) + (i / row.dim % 2 == 0 ? 0.15f : -0.15f);
      } else {
        std::uniform_real_distribution<float> uniform(0, 1);
        for (float& value : values) value = uniform(random);
      }
      return values;
    };
    if (row.dense) {
      cost = std::make_unique<DeviceBuffer>(fill(row.count * row.n * row.m));
    } else {
      x = std::make_unique<DeviceBuffer>(fill(row.count * row.n * row.dim));
      y = std::make_unique<DeviceBuffer>(fill(row.count * row.m * row.dim));
    }
  }
  std::unique_ptr<DeviceBuffer> cost, x, y;
};

struct Answer {
  Answer(const Row& row)
      : f(row.count * row.n * sizeof(double)),
        g(row.count * row.m * sizeof(double)),
        gradient_x(row.gradient ? row.count * row.n * row.dim * sizeof(float) : 0),
        gradient_y(row.gradient ? row.count * row.m * row.dim * sizeof(float) : 0),
        f_aa(row.debias ? row.count * row.n * sizeof(double) : 0),
        g_bb(row.debias ? row.count * row.m * sizeof(double) : 0),
        value(row.count * sizeof(double)) {}
  DeviceBuffer f, g, gradient_x, gradient_y, f_aa, g_bb, value;
  Convergence convergence;
};

Problem ProblemOf(const Row& row, const Inputs& in, const Answer& answer, Precision precision);

std::vector<std::unique_ptr<DeviceBuffer>> WorkspacesOf(const std::vector<Problem>& problems, const DeviceInfo& device);

// Solves all problems together; returns seconds. `convergence`: the first one's; may be null.
double Solve(const std::vector<Problem>& problems, const std::vector<std::unique_ptr<DeviceBuffer>>& workspaces,
             Context* context, Convergence* convergence);

// Largest difference of potentials, those of the self-terms too, in epsilons.
double Difference(const Row& row, const Answer& p, const Answer& q);

// Largest difference of a gradient, in units of its largest entry.
double GradientDifference(const Row& row, const Answer& p, const Answer& q);

}  // namespace sinkhorn

#endif  // SINKHORN_TESTS_BENCH_GPU_TRANSPORT_SOLVE_H_
