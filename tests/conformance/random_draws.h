// Problems drawn by their seeds from all over the contract's range: what the listed cases have not thought of. --rounds
// asks for more of them, --largest for larger ones, which other kernels solve.
#ifndef SINKHORN_TESTS_CONFORMANCE_RANDOM_DRAWS_H_
#define SINKHORN_TESTS_CONFORMANCE_RANDOM_DRAWS_H_

#include <cstdint>
#include <vector>

#include "absl/flags/declare.h"
#include "tests/conformance/case.h"
#include "tests/conformance/random_problems.h"

ABSL_DECLARE_FLAG(int, rounds);
ABSL_DECLARE_FLAG(int, first_seed);
ABSL_DECLARE_FLAG(int, largest);
ABSL_DECLARE_FLAG(int, smallest);

namespace sinkhorn::conformance {

// `known` ones, and one more of so many rounds.
std::vector<int> Seeds(std::vector<int> known, int of_rounds = 1);
// With --names, on standard error: what is solved next.
void SayNext(const Case& c);

double LogUniform(Random* random, double low, double high);

// ---- Transport ------------------------------------------------------------------------------

// Dense or clouds of any cost, for a fixed number of iterations, in STRICT or DOUBLE, with some of the outputs.
Case AnyTransport(uint64_t seed);
// After some iterations, or at a tolerance; its potentials as they are.
void AnyEnd(uint64_t seed, Case* c);
// In STRICT or FAST, until a tolerance is met or not, less the self-terms; its potentials as they are.
void AnyIterations(uint64_t seed, Case* c);
// In all precisions, until a tolerance is met, less the self-terms, with directions, some entries; in batches; now and
// then with numbers that no one means.
void AnySolver(uint64_t seed, Case* c);
// Clouds with directions, costs that have second derivatives, and an epsilon for which potentials and systems converge.
Case AnyHessian(uint64_t seed);

// ---- Normalisation --------------------------------------------------------------------------

// A batch, with its unrolled gradient.
Case AnyNormalization(uint64_t seed);
// Any derivative, EXACT among the recipes, until a tolerance is met, or the plan alone.
void AnyBackward(uint64_t seed, Case* c);

}  // namespace sinkhorn::conformance

#endif  // SINKHORN_TESTS_CONFORMANCE_RANDOM_DRAWS_H_
