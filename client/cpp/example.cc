// How far apart are two point clouds, and which way would each point of the first have to move? (The README quotes
// this.)
//
//   bazel run //client/cpp:example -- localhost:8001
#include <cstdio>
#include <vector>

#include "absl/time/clock.h"
#include "client/cpp/client.h"

using namespace sinkhorn::client;  // NOLINT: an example reads better without prefixes.

int main(int argc, char** argv) {
  const auto client = Client::Create(argc > 1 ? argv[1] : "localhost:8001");
  if (!client.ok()) return 1;

  const std::vector<float> x = {0, 0, 1, 0, 0, 1};        // Three points of the plane,
  const std::vector<float> y = {2, 2, 3, 2, 2, 3, 3, 3};  // and four.
  v1::SolveRequest request = PointCloudRequest(MakeTensor(x, {3, 2}), MakeTensor(y, {4, 2}),
                                               v1::COST_FUNCTION_SQUARED_EUCLIDEAN, /*epsilon=*/0.05);
  request.add_outputs(v1::OUTPUT_VALUE);
  request.add_outputs(v1::OUTPUT_GRADIENT_POINTS);

  const auto response = (*client)->Solve(request, absl::Now() + absl::Seconds(5));
  if (!response.ok()) {
    std::printf("%s\n", Describe(response.status()).c_str());
    return 1;
  }
  const v1::Convergence& convergence = response->convergence();
  std::printf("cost %.6f, at least %.6f; %d iterations, marginal error %.1e\n", response->value(0),
              response->dual_bound(0), convergence.iterations(), convergence.marginal_error_a());
  const absl::Span<const float> gradient = *View<float>(response->gradient_x());
  for (size_t i = 0; i < 3; ++i)
    std::printf("d cost / d x%zu = (%.4f, %.4f)\n", i, gradient[2 * i], gradient[2 * i + 1]);
  return 0;
}
