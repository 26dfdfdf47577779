// Comparison of answers with the oracle. The tolerances are the contract's: potentials in STRICT
// within 1e-4 epsilon + 1e-6 |f|, in DOUBLE within 1e-9 (epsilon + |f|), |f| the largest potential
// of either side; whatever else is compared gets what that error of the potentials makes of it.
// FAST: as STRICT, and what rounded coordinates do to costs; entries of the plan 2e-3 of themselves
// besides, for rounded densities.
#ifndef SINKHORN_TESTS_CONFORMANCE_CHECK_H_
#define SINKHORN_TESTS_CONFORMANCE_CHECK_H_

#include <string>

#include "tests/conformance/case.h"
#include "tests/oracle/transport_outputs.h"

namespace sinkhorn::conformance {

// Fails unless |actual - expected| <= tolerance for every element; one message, naming the worst.
void ExpectClose(const std::string& what, const Vector& actual, const Vector& expected, const Vector& tolerance);
void ExpectClose(const std::string& what, const Vector& actual, const Vector& expected, double tolerance);

// Error that the contract allows in a potential.
double PotentialTolerance(const Case& the_case, const oracle::Potentials& reference);
// What it does to a plan entry, relatively: both potentials may be off.
double PlanTolerance(const Case& the_case, const oracle::Potentials& reference);

// Bound of a cost's slope in a coordinate: of the terms that a gradient adds up.
double LargestSlope(const oracle::Transport& problem);
// What errors of the potentials, and relative ones of the plan's entries, do to the gradient in a.
Vector GradientARoom(const oracle::Transport& problem, const oracle::Potentials& at, double potential_error,
                     double plan_error);

// Compares every output that the case asked for with the oracle at `reference`; bounds must be on
// their side of the oracle's. For fixed iterations: the constant shared by f and g is determined
// too. `projects_light_rows`: so are projections of rows that weigh less than the arithmetic's
// smallest numbers.
void ExpectMatchesOracle(const Case& member_case, const Answer& member, const oracle::Potentials& reference,
                         bool projects_light_rows = true);

// Solves on `backend` and compares each member with the oracle's iterates. REQUIRES: tolerance 0,
// not debiased.
void CheckIterates(Backend* backend, const Case& the_case);

// f and g without the constant that a balanced problem leaves free: moves the mean of f to 0.
oracle::Potentials Centered(const oracle::Potentials& potentials);

// "STRICT " or "DOUBLE ", and whether the output was rounded to a shorter type: those use up their
// rounding.
std::string LabelPrefix(const Case& the_case);

// How much of each tolerance was used at most, over the whole run, by quantity.
void PrintToleranceUse();

}  // namespace sinkhorn::conformance

#endif  // SINKHORN_TESTS_CONFORMANCE_CHECK_H_
