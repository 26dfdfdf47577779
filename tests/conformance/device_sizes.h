// Sizes for which a GPU has ways of its own: problems of such sizes, and what is to be expected of them.
#ifndef SINKHORN_TESTS_CONFORMANCE_DEVICE_SIZES_H_
#define SINKHORN_TESTS_CONFORMANCE_DEVICE_SIZES_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/conformance/backends.h"
#include "tests/conformance/case.h"
#include "tests/conformance/random_problems.h"

namespace sinkhorn::conformance {

// Under a sanitizer sides are so much shorter: no GPU is there, others have no ways of their own for these sizes, and
// all pairs would take it ten minutes.
#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kShorter = 4;
#else
constexpr int64_t kShorter = 1;
#endif

// Problems for which it takes a whole GPU, or a part of it. Every other one has points or costs without mass.
struct LargeShape {
  int64_t n, m, dim;  // No dim: costs.
  double epsilon;
  int iterations;
  Precision precision;
  double tolerance = 0;
  double rho = std::numeric_limits<double>::infinity();
  PointCost cost = PointCost::kSquaredEuclidean;
};
std::vector<Case> CasesOf(const std::vector<LargeShape>& shapes);

// Members with points of their own, the second's spread out so much more.
Case Members(const LargeShape& of, int64_t count, double spread, Random* random);

// Every so many cases once more, debiased, unless they have costs.
void AddDebiased(std::vector<Case>* cases, size_t step);

class DeviceSizesTest : public ConformanceTest {
 protected:
  // To float64.
  Answer Solution(Case c);

  bool is_gpu() const { return GetParam() == "cuda"; }
  // Of many iterations, other backends than a GPU, without ways of their own for sizes, try a few.
  std::vector<LargeShape> Chosen(std::vector<LargeShape> shapes, size_t few) const;

  // On a GPU, however long slices are.
  void ExpectRightTogetherAndAlone(const std::vector<LargeShape>& shapes) {
    ExpectRightTogetherAndAlone(CasesOf(shapes));
  }
  void ExpectRightTogetherAndAlone(const std::vector<Case>& cases);

  // The same of those with a tolerance, at which they stop wherever they are, or else, if iterations are few, when all
  // of them are done.
  void ExpectSolvedTogetherAndAlone(const std::vector<Case>& cases);
};

}  // namespace sinkhorn::conformance

#endif  // SINKHORN_TESTS_CONFORMANCE_DEVICE_SIZES_H_
