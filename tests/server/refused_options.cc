// What options, outputs and sizes must be.
#include <limits>
#include <string>

#include "tests/server/refused.h"
#include "tests/server/requests.h"

namespace sinkhorn {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

using R = v1::SolveRequest;

}  // namespace

std::vector<Refused> SolverRules() {
  const auto solver = [](const std::function<void(v1::SolverOptions*)>& change) {
    return [change](R* r) { change(r->mutable_solver()); };
  };
  return {
      {"no_solver", Dense, [](R* r) { r->clear_solver(); }, "solver.epsilon"},
      {"epsilon_zero", Dense, solver([](auto* s) { s->set_epsilon(0); }), "solver.epsilon"},
      {"epsilon_negative", Dense, solver([](auto* s) { s->set_epsilon(-1); }), "solver.epsilon"},
      {"epsilon_nan", Dense, solver([](auto* s) { s->set_epsilon(kNan); }), "solver.epsilon"},
      {"epsilon_infinite", Dense, solver([](auto* s) { s->set_epsilon(kInf); }), "solver.epsilon"},
      {"epsilon_and_blur", Dense, solver([](auto* s) { s->set_blur(1); }), "solver.blur"},
      {"blur_negative", Dense, solver([](auto* s) {
         s->clear_epsilon();
         s->set_blur(-1);
       }),
       "solver.blur"},
      {"blur_squared_underflows", PointCloud, solver([](auto* s) {
         s->clear_epsilon();
         s->set_blur(1e-200);
       }),
       "solver.blur"},
      {"scaling_one", Dense, solver([](auto* s) { s->set_scaling(1); }), "solver.scaling"},
      {"scaling_negative", Dense, solver([](auto* s) { s->set_scaling(-.5); }), "solver.scaling"},
      {"scaling_nan", Dense, solver([](auto* s) { s->set_scaling(kNan); }), "solver.scaling"},
      {"epsilon_start_small", Dense, solver([](auto* s) {
         s->set_scaling(.5);
         s->set_epsilon_start(.4);
       }),
       "solver.epsilon_start"},
      {"epsilon_start_infinite", Dense, solver([](auto* s) {
         s->set_scaling(.5);
         s->set_epsilon_start(kInf);
       }),
       "solver.epsilon_start"},
      {"epsilon_start_without_scaling", Dense, solver([](auto* s) { s->set_epsilon_start(2); }),
       "solver.epsilon_start"},
      {"unknown_update_rule", Dense, solver([](auto* s) { s->set_update_rule(static_cast<v1::UpdateRule>(7)); }),
       "solver.update_rule"},
      {"unknown_over_relaxation", Dense,
       solver([](auto* s) { s->set_over_relaxation(static_cast<v1::OverRelaxation>(7)); }), "solver.over_relaxation"},
      {"unknown_precision", Dense, solver([](auto* s) { s->set_precision(static_cast<v1::Precision>(7)); }),
       "solver.precision"},
      {"iterations_negative", Dense, solver([](auto* s) { s->set_max_iterations(-1); }), "solver.max_iterations"},
      {"iterations_over_limit", Dense, solver([](auto* s) { s->set_max_iterations(5001); }), "solver.max_iterations",
       "PROBLEM_TOO_LARGE"},
      {"tolerance_negative", Dense, solver([](auto* s) { s->set_tolerance(-1e-9); }), "solver.tolerance"},
      {"tolerance_nan", Dense, solver([](auto* s) { s->set_tolerance(kNan); }), "solver.tolerance"},
      {"reach_zero", Dense, solver([](auto* s) { s->set_reach_a(0); }), "solver.reach_a"},
      {"reach_infinite", Dense, solver([](auto* s) { s->set_reach_b(kInf); }), "solver.reach_b"},
  };
}

std::vector<Refused> OutputRules() {
  const auto output = [](int value) { return [value](R* r) { r->add_outputs(static_cast<v1::Output>(value)); }; };
  return {
      {"output_unset", Dense, output(0), "outputs[0]"},
      {"output_unknown", Dense, output(12), "outputs[0]"},
      {"output_negative", Dense, output(-1), "outputs[0]"},
      {"second_output", Dense,
       [](R* r) {
         r->add_outputs(v1::OUTPUT_VALUE);
         r->add_outputs(v1::OUTPUT_PROJECTION);
       },
       "outputs[1]"},
      {"value_of_normalization", Normalization, output(v1::OUTPUT_VALUE), "outputs[0]"},
      {"value_linear_of_normalization", Normalization, output(v1::OUTPUT_VALUE_LINEAR), "outputs[0]"},
      {"primal_bound_of_normalization", Normalization, output(v1::OUTPUT_PRIMAL_BOUND), "outputs[0]"},
      {"potentials_of_normalization", Normalization, output(v1::OUTPUT_POTENTIALS), "outputs[0]"},
      {"points_of_normalization", Normalization, output(v1::OUTPUT_GRADIENT_POINTS), "outputs[0]"},
      {"masses_of_normalization", Normalization, output(v1::OUTPUT_GRADIENT_MASSES), "outputs[0]"},
      {"cost_of_normalization", Normalization, output(v1::OUTPUT_GRADIENT_COST), "outputs[0]"},
      {"points_of_dense", Dense, output(v1::OUTPUT_GRADIENT_POINTS), "outputs[0]"},
      {"projection_of_dense", Dense, output(v1::OUTPUT_PROJECTION), "outputs[0]"},
      {"cost_of_points", PointCloud, output(v1::OUTPUT_GRADIENT_COST), "outputs[0]"},
      {"primal_bound_unbalanced", Dense,
       [](R* r) {
         r->mutable_solver()->set_reach_a(1);
         r->add_outputs(v1::OUTPUT_PRIMAL_BOUND);
       },
       "outputs[0]"},
      {"primal_bound_debiased", PointCloud,
       [](R* r) {
         r->mutable_solver()->set_debias(true);
         r->add_outputs(v1::OUTPUT_PRIMAL_BOUND);
       },
       "outputs[0]"},
      {"hessian_of_dense", Dense,
       [](R* r) {
         *r->mutable_hessian()->mutable_x() = Filled({1, 2, 2}, 1);
       },
       "hessian"},
      {"hessian_of_distances", PointCloud,
       [](R* r) {
         r->mutable_point_cloud()->set_cost(v1::COST_FUNCTION_EUCLIDEAN);
         *r->mutable_hessian()->mutable_x() = Filled({1, 2, 2}, 1);
       },
       "hessian"},
      {"hessian_of_nothing", PointCloud, [](R* r) { r->mutable_hessian()->set_max_iterations(5); }, "hessian.x"},
      {"hessian_shape", PointCloud,
       [](R* r) {
         *r->mutable_hessian()->mutable_x() = Filled({1, 2, 3}, 1);
       },
       "hessian.x.shape"},
      {"hessian_counts_differ", PointCloud,
       [](R* r) {
         *r->mutable_hessian()->mutable_x() = Filled({1, 2, 2}, 1);
         *r->mutable_hessian()->mutable_y() = Filled({2, 3, 2}, 1);
       },
       "hessian.y.shape"},
      {"hessian_nan", PointCloud,
       [](R* r) {
         *r->mutable_hessian()->mutable_y() = Filled({1, 3, 2}, kNan);
       },
       "hessian.y.data"},
      {"hessian_preconditioner", PointCloud,
       [](R* r) {
         *r->mutable_hessian()->mutable_x() = Filled({1, 2, 2}, 1);
         r->mutable_hessian()->set_preconditioner(static_cast<v1::Preconditioner>(9));
       },
       "hessian.preconditioner"},
      {"hessian_terms_without_neumann", PointCloud,
       [](R* r) {
         *r->mutable_hessian()->mutable_x() = Filled({1, 2, 2}, 1);
         r->mutable_hessian()->set_neumann_terms(2);
       },
       "hessian.neumann_terms"},
      {"hessian_tolerance", PointCloud,
       [](R* r) {
         *r->mutable_hessian()->mutable_x() = Filled({1, 2, 2}, 1);
         r->mutable_hessian()->set_tolerance(kNan);
       },
       "hessian.tolerance"},
      {"hessian_negative_iterations", PointCloud,
       [](R* r) {
         *r->mutable_hessian()->mutable_x() = Filled({1, 2, 2}, 1);
         r->mutable_hessian()->set_max_iterations(-1);
       },
       "hessian.max_iterations"},
      {"sparse_plan_of_normalization", Normalization, [](R* r) { r->mutable_sparse_plan()->set_max_entries(5); },
       "sparse_plan"},
      {"sparse_plan_threshold", Dense,
       [](R* r) {
         r->mutable_sparse_plan()->set_threshold(-1);
         r->mutable_sparse_plan()->set_max_entries(5);
       },
       "sparse_plan.threshold"},
      {"sparse_plan_without_room", Dense, [](R* r) { r->mutable_sparse_plan()->set_threshold(0.5); },
       "sparse_plan.max_entries"},
      {"plan_from_plan", Normalization,
       [](R* r) {
         r->mutable_normalization()->clear_logits();
         *r->mutable_normalization()->mutable_plan() = Filled({2, 2}, 1);
         *r->mutable_normalization()->mutable_cotangent() = Filled({2, 2}, 1);
         r->add_outputs(v1::OUTPUT_PLAN);
       },
       "outputs[0]"},
  };
}

std::vector<Refused> LimitRules() {
  const char* const kReason = "PROBLEM_TOO_LARGE";
  return {
      {"request_id", Dense, [](R* r) { r->set_request_id(std::string(129, 'x')); }, "request_id"},
      {"points_x", PointCloud,
       [](R* r) {
         *r->mutable_point_cloud()->mutable_x() = Filled({51, 2}, 0);
       },
       "point_cloud.x.shape", kReason},
      {"points_y", PointCloud,
       [](R* r) {
         *r->mutable_point_cloud()->mutable_y() = Filled({51, 2}, 0);
       },
       "point_cloud.y.shape", kReason},
      {"dimension", PointCloud,
       [](R* r) {
         *r->mutable_point_cloud()->mutable_x() = Filled({2, 41}, 0);
         *r->mutable_point_cloud()->mutable_y() = Filled({3, 41}, 0);
       },
       "point_cloud.x.shape", kReason},
      {"matrix_dense", Dense,
       [](R* r) {
         *r->mutable_dense()->mutable_cost() = Filled({7, 143}, 0);
       },
       "dense.cost.shape", kReason},
      {"matrix_logits", Normalization,
       [](R* r) {
         *r->mutable_normalization()->mutable_logits() = Filled({7, 143}, 0);
       },
       "normalization.logits.shape", kReason},
      {"matrix_logits_with_dustbin", Normalization,
       [](R* r) {
         *r->mutable_normalization()->mutable_logits() = Filled({31, 31}, 0);  // 961, with the dustbin 1024.
         *r->mutable_normalization()->mutable_dustbin_score() = Filled({}, 0);
       },
       "normalization.logits.shape", kReason},
      {"matrix_plan_given", Normalization,
       [](R* r) {
         r->mutable_normalization()->clear_logits();
         *r->mutable_normalization()->mutable_plan() = Filled({7, 143}, 0);
         *r->mutable_normalization()->mutable_cotangent() = Filled({7, 143}, 0);
       },
       "normalization.plan.shape", kReason},
      {"matrix_plan_of_points", PointCloud,
       [](R* r) {
         *r->mutable_point_cloud()->mutable_x() = Filled({40, 2}, 0);
         *r->mutable_point_cloud()->mutable_y() = Filled({40, 2}, 0);
         r->add_outputs(v1::OUTPUT_PLAN);
       },
       "outputs", kReason},
      {"members", Dense,
       [](R* r) {
         *r->mutable_dense()->mutable_cost() = Filled({101, 2, 3}, 0);
       },
       "problem", kReason},
      {"members_of_two_dimensions", Dense,
       [](R* r) {
         *r->mutable_dense()->mutable_a() = Filled({11, 10, 2}, .5f);
       },
       "problem", kReason},
      {"apply_columns", Dense,
       [](R* r) {
         *r->mutable_apply_v() = Filled({3, 41}, 0);
       },
       "apply_v.shape", kReason},
      {"apply_u_columns", Dense,
       [](R* r) {
         *r->mutable_apply_u() = Filled({2, 41}, 0);
       },
       "apply_u.shape", kReason},
      {"hessian_directions", PointCloud,
       [](R* r) {
         *r->mutable_hessian()->mutable_x() = Filled({129, 2, 2}, 1);
       },
       "hessian", kReason},
      {"hessian_iterations", PointCloud,
       [](R* r) {
         *r->mutable_hessian()->mutable_x() = Filled({1, 2, 2}, 1);
         r->mutable_hessian()->set_max_iterations(5001);
       },
       "hessian.max_iterations", kReason},
      {"sparse_plan_entries", Dense, [](R* r) { r->mutable_sparse_plan()->set_max_entries(1001); },
       "sparse_plan.max_entries", kReason},
      {"sparse_plan_bytes", Dense,
       [](R* r) {
         *r->mutable_dense()->mutable_cost() = Filled({90, 3, 10}, 0);
         r->mutable_sparse_plan()->set_max_entries(1000);
         r->add_outputs(v1::OUTPUT_VALUE);
       },
       "outputs", kReason},
      {"reply_bytes", Dense,
       [](R* r) {
         *r->mutable_dense()->mutable_a() = Filled({90, 2}, .5f);
         *r->mutable_dense()->mutable_cost() = Filled({2, 30}, 0);
         r->add_outputs(v1::OUTPUT_PLAN);
       },
       "outputs", kReason},
  };
}

}  // namespace sinkhorn
