// Requests for the server's tests: tensors from numbers, and a small valid problem of each kind.
#ifndef SINKHORN_TESTS_SERVER_REQUESTS_H_
#define SINKHORN_TESTS_SERVER_REQUESTS_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn {

inline v1::Tensor Float32Tensor(const std::vector<int64_t>& shape, const std::vector<float>& values) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DATA_TYPE_FLOAT32);
  for (int64_t extent : shape) tensor.add_shape(extent);
  tensor.set_data(values.data(), values.size() * sizeof(float));
  return tensor;
}

inline v1::Tensor Float64Tensor(const std::vector<int64_t>& shape, const std::vector<double>& values) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DATA_TYPE_FLOAT64);
  for (int64_t extent : shape) tensor.add_shape(extent);
  tensor.set_data(values.data(), values.size() * sizeof(double));
  return tensor;
}

// A float32 tensor of `shape` filled with `value`.
inline v1::Tensor Filled(const std::vector<int64_t>& shape, float value) {
  int64_t size = 1;
  for (int64_t extent : shape) size *= extent;
  return Float32Tensor(shape, std::vector<float>(size, value));
}

inline std::vector<float> Floats(const v1::Tensor& tensor) {
  std::vector<float> values(tensor.data().size() / sizeof(float));
  std::memcpy(values.data(), tensor.data().data(), tensor.data().size());
  return values;
}

// 2 x 3 logits.
inline v1::SolveRequest Normalization() {
  v1::SolveRequest request;
  *request.mutable_normalization()->mutable_logits() = Float32Tensor({2, 3}, {0, 1, 2, 3, 4, 5});
  return request;
}

// 2 x 3 costs.
inline v1::SolveRequest Dense() {
  v1::SolveRequest request;
  *request.mutable_dense()->mutable_cost() = Float32Tensor({2, 3}, {0, 1, 2, 3, 4, 5});
  request.mutable_solver()->set_epsilon(0.5);
  return request;
}

// 2 points against 3 in the plane.
inline v1::SolveRequest PointCloud() {
  v1::SolveRequest request;
  auto* problem = request.mutable_point_cloud();
  *problem->mutable_x() = Float32Tensor({2, 2}, {0, 0, 1, 1});
  *problem->mutable_y() = Float32Tensor({3, 2}, {0, 1, 1, 0, 2, 2});
  problem->set_cost(v1::COST_FUNCTION_SQUARED_EUCLIDEAN);
  request.mutable_solver()->set_epsilon(0.5);
  return request;
}

}  // namespace sinkhorn

#endif  // SINKHORN_TESTS_SERVER_REQUESTS_H_
