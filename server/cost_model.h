// Predicted device seconds of a problem: a formula fitted to measurements, and what has been measured since.
//
//   predicted = ratio(class) * (overhead + factor * figure(min(max_iterations, usual iterations)))
//
// `figure` is the backend's own (PredictedSeconds), which knows how work grows with shape, options and outputs.
// overhead, factor and, for problems that end at a tolerance, the usual number of iterations are cost_table.h's: fitted
// to measurements by tests/bench/cost_model.py, a row for each family of problems. ratio(class) is measured over
// predicted seconds of the class's problems lately, the most recent ones counting most; 1 until there are any. Company
// makes small problems cheaper, a busy machine makes all dearer, and data decide how long a tolerance takes: it learns
// all three.
//
// No clock and no lock: the scheduler has both.
#ifndef SINKHORN_SERVER_COST_MODEL_H_
#define SINKHORN_SERVER_COST_MODEL_H_

#include <array>
#include <cstdint>

#include "kernels/backend.h"
#include "kernels/problem.h"

namespace sinkhorn {

// Problems that a row of the table speaks for.
enum class CostFamily : uint8_t {
  kNormalization,          // Forward.
  kNormalizationGradient,  // With a cotangent, or backward from a plan.
  kNormalizationExact,
  kDense,  // A fixed number of iterations.
  kDenseTolerance,
  kPointCloud,
  kPointCloudTolerance,
};
constexpr int kCostFamilies = 7;
CostFamily CostFamilyOf(const Problem& problem);
const char* CostFamilyName(CostFamily family);

class CostModel {
 public:
  // `backend` outlives it.
  explicit CostModel(const Backend* backend);

  // What the fitted formula says of a problem.
  struct Formula {
    int problem_class = 0;
    double seconds = 0;    // Finite, >= 0.
    bool guessed = false;  // The iterations are not known: it ends at a tolerance.
  };
  // Any thread, beside the others too.
  Formula FormulaOf(const Problem& problem) const;

  // Measured over predicted seconds of the class. Within [1e-4, 1e4].
  double ratio(int problem_class) const;
  // Whether enough problems of the class have been measured to believe the ratio.
  bool known(int problem_class) const { return classes_[problem_class].measured >= kKnown; }
  // A problem of the class took `seconds` of the device. Counts as at most kMostSurprise times more or less than
  // predicted: one odd problem does not speak for all.
  void Measured(int problem_class, double formula_seconds, double seconds);
  // Somebody was turned away because of the ratio: it goes a little towards 1.
  void Doubt(int problem_class);

  static constexpr double kMaxSeconds = 1e6;              // Of any prediction.
  static constexpr int kClasses = kCostFamilies * 2 * 8;  // Family, float64 or not, size.

 private:
  static constexpr int kKnown = 8;
  static constexpr double kMostSurprise = 16;
  struct Class {
    double measured_seconds = 0, formula_seconds = 0;  // Each problem weighs 15/16 of the next.
    int measured = 0;                                  // Up to kKnown.
  };
  const Backend* const backend_;
  const struct CostRow* const costs_;  // A row for each family.
  std::array<Class, kClasses> classes_{};
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_COST_MODEL_H_
