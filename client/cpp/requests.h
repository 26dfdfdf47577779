// The three problems as one-line requests. All other fields of the contract can be set on what these return.
//
//   v1::SolveRequest request = PointCloudRequest(MakeTensor(x, {n, d}), MakeTensor(y, {m, d}),
//                                                v1::COST_FUNCTION_SQUARED_EUCLIDEAN, /*epsilon=*/0.05);
//   request.add_outputs(v1::OUTPUT_GRADIENT_POINTS);
#ifndef SINKHORN_CLIENT_CPP_REQUESTS_H_
#define SINKHORN_CLIENT_CPP_REQUESTS_H_

#include <utility>

#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn::client {

namespace v1 = ::sinkhorn::v1;

// Scales exp(logits), [..., n, m], to unit row and column sums. 0 iterations: the recipe's default.
inline v1::SolveRequest NormalizationRequest(v1::Tensor logits, int iterations = 0,
                                             v1::NormalizationRecipe recipe = v1::NORMALIZATION_RECIPE_LOG_ROW_COLUMN) {
  v1::SolveRequest request;
  *request.mutable_normalization()->mutable_logits() = std::move(logits);
  request.mutable_normalization()->set_recipe(recipe);
  if (iterations != 0) request.mutable_solver()->set_max_iterations(iterations);
  return request;
}

// Transport under a cost matrix [..., n, m] between uniform masses (set `dense().a` and `.b` for others).
inline v1::SolveRequest DenseRequest(v1::Tensor cost, double epsilon) {
  v1::SolveRequest request;
  *request.mutable_dense()->mutable_cost() = std::move(cost);
  request.mutable_solver()->set_epsilon(epsilon);
  return request;
}

// Transport between clouds x [..., n, d] and y [..., m, d] of uniform masses (set `point_cloud().a` and `.b` for
// others).
inline v1::SolveRequest PointCloudRequest(v1::Tensor x, v1::Tensor y, v1::CostFunction cost, double epsilon) {
  v1::SolveRequest request;
  *request.mutable_point_cloud()->mutable_x() = std::move(x);
  *request.mutable_point_cloud()->mutable_y() = std::move(y);
  request.mutable_point_cloud()->set_cost(cost);
  request.mutable_solver()->set_epsilon(epsilon);
  return request;
}

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_CPP_REQUESTS_H_
