// Comparison of normalisations with the oracle. STRICT is what float32 makes of exponents as large as the logits;
// DOUBLE is 1e-9, relatively. Gradients: 1e-5 and 1e-9 of the largest entry.
#ifndef SINKHORN_TESTS_CONFORMANCE_CHECK_NORMALIZATION_H_
#define SINKHORN_TESTS_CONFORMANCE_CHECK_NORMALIZATION_H_

#include <string>

#include "tests/conformance/case.h"

namespace sinkhorn::conformance {

// Room for each entry of P. Entries below 1e-10 of a marginal of 1 may be lost to underflow in STRICT.
Vector PlanRoom(const Case& the_case, const oracle::Normalization& problem, const Vector& plan);

// Room for each entry of a gradient whose largest one is `largest`. A derivative that cancels, such as that of a matrix
// whose P cannot change, is known to a few roundings of what cancels in it.
double GradientRoom(const Case& the_case, double largest, double cancelled);

// P, its sums and the marginal errors of a case of one member, against the recipe's steps.
void ExpectMatchesRecipe(const Case& member_case, const Answer& member);

// The gradient of a case of one member, against the reverse of the recipe's steps. `what` names the comparison.
void ExpectMatchesUnrolled(const std::string& what, const Case& member_case, const Answer& member);

// The gradient of a case of one member by an implicit mode, against that mode's formula at the plan of the answer: up
// to a hundred times what the rounding of the plan itself does to it. Not of logits beyond 10, whose plans may be as
// good as parted, nor of marginals below 0.01 or beyond 100, which IMPLICIT_UNIT is not for: their systems may be
// singular but for roundings.
void ExpectMatchesImplicit(const std::string& what, const Case& member_case, const Answer& member);

// The plan of EXACT scales the exponentials of the logits, and is as far from its marginals as it is said to be.
void ExpectScalesExactly(const Case& member_case, const Answer& member);

}  // namespace sinkhorn::conformance

#endif  // SINKHORN_TESTS_CONFORMANCE_CHECK_NORMALIZATION_H_
