// What gpu_transport solves: the rows of the tables, and those that are made when asked for.
#ifndef SINKHORN_TESTS_BENCH_GPU_TRANSPORT_ROWS_H_
#define SINKHORN_TESTS_BENCH_GPU_TRANSPORT_ROWS_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/problem.h"

namespace sinkhorn {

struct Row {
  std::string name;
  bool dense = false;
  int64_t count = 1, n = 0, m = 0, dim = 0;
  double epsilon = 0.1;
  int iterations = 10;
  double tolerance = 0;
  double rho = std::numeric_limits<double>::infinity();
  double decay = 0, kappa = 1;
  bool symmetric = false, over_relaxation = true, gradient = false, mixture = false, debias = false;
  Precision precision = Precision::kStrict;
  PointCost cost = PointCost::kSquaredEuclidean;
  bool check = true;
  int repeats = 20;
};

// All rows of the tables, or those of a name: "batch"; of them those of a size and dimension: "batch/512/64". Only by
// their names: "costs", "checks" and "tiny".
std::vector<Row> RowsOf(const std::string& argument);

}  // namespace sinkhorn

#endif  // SINKHORN_TESTS_BENCH_GPU_TRANSPORT_ROWS_H_
