// What the server's cost model was fitted to. Made by tests/bench/cost_model.py; not to be edited.
//
// cpu: AVX3_DL, 2 threads; Intel(R) Xeon(R) Processor, 2 cores, Linux; 2026-11-21 20:12 UTC.
// The samples: tests/bench/results/cost_model.csv; how well they fit: cost_model.md there.
#ifndef SINKHORN_SERVER_COST_TABLE_H_
#define SINKHORN_SERVER_COST_TABLE_H_

namespace sinkhorn {

// predicted = overhead_seconds + factor * the backend's figure for min(max_iterations, iterations).
struct CostRow {
  double overhead_seconds;
  double factor;
  int iterations;  // With a tolerance: as many as problems usually take. 0: all of max_iterations.
};

// The CPU backend. In the order of CostFamily.
constexpr CostRow kCpuCosts[] = {
    {1.38e-05, 2.53, 0},   // normalization
    {3.31e-05, 2.33, 0},   // normalization_gradient
    {1.7e-05, 1.31, 5},    // normalization_exact
    {3.07e-05, 2.38, 0},   // dense
    {4.07e-05, 4.19, 5},   // dense_tolerance
    {1.4e-05, 2.33, 0},    // point_cloud
    {4.13e-05, 3.52, 12},  // point_cloud_tolerance
};

// A GPU: its backend's figures were measured with its kernels, and stand until problems have been.
constexpr CostRow kOtherCosts[] = {
    {0, 1, 0},    // normalization
    {0, 1, 0},    // normalization_gradient
    {0, 1, 30},   // normalization_exact
    {0, 1, 0},    // dense
    {0, 1, 100},  // dense_tolerance
    {0, 1, 0},    // point_cloud
    {0, 1, 100},  // point_cloud_tolerance
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_COST_TABLE_H_
