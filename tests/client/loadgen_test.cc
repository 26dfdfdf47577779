// The load generator: its histogram against sorting, its mixes, what --verify catches, and that its two loops measure
// what they say, against a server whose delays are known.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/tensor.h"
#include "client/loadgen/histogram.h"
#include "client/loadgen/load.h"
#include "client/loadgen/mix.h"
#include "client/loadgen/verify.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_service.h"

namespace sinkhorn::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

// ---- Histogram ----

TEST(HistogramTest, PercentilesAgreeWithSorting) {
  std::mt19937_64 random(3);
  std::lognormal_distribution<double> spread(12, 4);  // Over eight decades.
  Histogram histogram;
  std::vector<int64_t> values;
  for (int i = 0; i < 20'000; ++i) {
    values.push_back(static_cast<int64_t>(spread(random)));
    histogram.Record(values.back());
  }
  std::sort(values.begin(), values.end());

  for (const double fraction : {0.0, 0.001, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0}) {
    const size_t rank = std::max<size_t>(1, static_cast<size_t>(std::ceil(fraction * 20'000)));
    const double exact = static_cast<double>(values[rank - 1]);
    EXPECT_GE(histogram.Percentile(fraction), exact) << fraction;
    EXPECT_LE(static_cast<double>(histogram.Percentile(fraction)), exact * (1 + 1.0 / 128)) << fraction;
  }
  EXPECT_EQ(histogram.max(), values.back());
  EXPECT_EQ(histogram.count(), 20'000);
}

TEST(HistogramTest, SmallValuesAreExactAndExtremesFit) {
  Histogram histogram;
  EXPECT_EQ(histogram.Percentile(0.5), 0);
  for (int value = 0; value < 256; ++value) histogram.Record(value);
  for (int value = 0; value < 256; ++value) EXPECT_EQ(histogram.Percentile((value + 1) / 256.0), value);
  EXPECT_DOUBLE_EQ(histogram.mean(), 127.5);
  histogram.Record(-5);
  histogram.Record(std::numeric_limits<int64_t>::max());
  EXPECT_EQ(histogram.max(), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(histogram.Percentile(1), std::numeric_limits<int64_t>::max());
}

TEST(HistogramTest, MergesAsIfRecordedTogether) {
  Histogram first, second, both;
  for (int i = 0; i < 1000; ++i) {
    (i % 3 == 0 ? first : second).Record(i * i);
    both.Record(i * i);
  }
  first.Merge(second);
  for (const double fraction : {0.01, 0.5, 0.99, 1.0}) {
    EXPECT_EQ(first.Percentile(fraction), both.Percentile(fraction));
  }
  EXPECT_EQ(first.mean(), both.mean());
}

// ---- Mix ----

TEST(MixTest, ReadsTheWholeGrammar) {
  const auto mix = ParseMix(
      "normalization:32x4x4:20=0.9,point_cloud:256x300x64:10:epsilon=0.05:gradient=0.1,dense:100x200,"
      "dense:2x3x4:tolerance=1e-6=2,normalization:4x4:recipe=exact:dtype=float16,point_cloud:7x5x6x3:debias:fast=3");

  ASSERT_TRUE(mix.ok()) << mix.status();
  ASSERT_EQ(mix->size(), 6u);
  const auto& [a, b, c, d, e, f] = std::tie((*mix)[0], (*mix)[1], (*mix)[2], (*mix)[3], (*mix)[4], (*mix)[5]);
  EXPECT_EQ(a.name, "normalization:32x4x4:20");
  EXPECT_EQ(a.weight, 0.9);
  EXPECT_EQ(a.batch, 32);
  EXPECT_EQ(a.problem_count(), 32);
  EXPECT_EQ(a.blank.solver().max_iterations(), 20);
  EXPECT_FALSE(a.blank.solver().has_tolerance()) << "its default is 0 already";
  EXPECT_EQ(b.name, "point_cloud:256x300x64:10:epsilon=0.05:gradient");
  EXPECT_EQ(b.weight, 0.1);
  EXPECT_EQ(b.batch, 0);
  EXPECT_EQ(b.n, 256);
  EXPECT_EQ(b.m, 300);
  EXPECT_EQ(b.dim, 64);
  EXPECT_EQ(b.blank.solver().epsilon(), 0.05);
  EXPECT_EQ(b.blank.solver().tolerance(), 0);
  EXPECT_TRUE(b.blank.solver().has_tolerance());
  EXPECT_THAT(b.blank.outputs(), ElementsAre(v1::OUTPUT_VALUE, v1::OUTPUT_GRADIENT_POINTS));
  EXPECT_EQ(c.weight, 1);
  EXPECT_FALSE(c.blank.solver().has_tolerance());
  EXPECT_EQ(d.weight, 2);
  EXPECT_EQ(d.batch, 2);
  EXPECT_EQ(d.blank.solver().tolerance(), 1e-6);
  EXPECT_EQ(e.dtype, v1::DATA_TYPE_FLOAT16);
  EXPECT_EQ(e.blank.normalization().recipe(), v1::NORMALIZATION_RECIPE_EXACT);
  EXPECT_EQ(f.batch, 7);
  EXPECT_TRUE(f.blank.solver().debias());
  EXPECT_EQ(f.blank.solver().precision(), v1::PRECISION_FAST);
  EXPECT_EQ(f.weight, 3);
}

TEST(MixTest, RefusesWhatItCannotRead) {
  for (const char* text :
       {"", "grid:4x4", "dense", "dense:4", "dense:4x0", "dense:4xa", "dense:1x2x3x4", "dense:4x4=0", "dense:4x4=-1",
        "dense:4x4:hurried", "normalization:4x4:fast", "normalization:4x4:epsilon=1", "dense:4x4:epsilon=x",
        "dense:4x4:debias", "dense:4x4:10=2=3", "point_cloud:4x4", "dense:4x4:dtype=int8"}) {
    EXPECT_EQ(ParseMix(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(MixTest, InputsDependOnTheSeedAlone) {
  const MixEntry entry = (*ParseMix("point_cloud:2x5x6x3:10"))[0];

  const v1::SolveRequest request = MakeRequest(entry, 1, false);

  EXPECT_THAT(request.point_cloud().x().shape(), ElementsAre(2, 5, 3));
  EXPECT_THAT(request.point_cloud().y().shape(), ElementsAre(2, 6, 3));
  EXPECT_TRUE(CheckTensor(request.point_cloud().x()).ok());
  EXPECT_EQ(MakeRequest(entry, 1, false).SerializeAsString(), request.SerializeAsString());
  EXPECT_NE(MakeRequest(entry, 2, false).SerializeAsString(), request.SerializeAsString());
  EXPECT_THAT(MakeRequest(entry, 1, true).outputs(), testing::Contains(v1::OUTPUT_MARGINALS));
}

// ---- Verify ----

// A right answer to a 2 x 2 normalisation that ends on columns: rows sum to 1.1 and 0.9.
v1::SolveResponse GoodNormalization() {
  v1::SolveResponse response;
  *response.mutable_plan() = MakeTensor(std::vector<float>{0.5f, 0.6f, 0.5f, 0.4f}, {2, 2});
  *response.mutable_row_sums() = MakeTensor(std::vector<float>{1.1f, 0.9f}, {2});
  *response.mutable_column_sums() = MakeTensor(std::vector<float>{1, 1}, {2});
  response.mutable_convergence()->set_marginal_error_a(0.2);
  return response;
}

std::string VerifyNormalizationAnswer(const v1::SolveResponse& response) {
  const MixEntry entry = (*ParseMix("normalization:2x2:20"))[0];
  return VerifyAnswer(entry, MakeRequest(entry, 1, true), response);
}

TEST(VerifyTest, AcceptsARightNormalization) { EXPECT_EQ(VerifyNormalizationAnswer(GoodNormalization()), ""); }

TEST(VerifyTest, CatchesWrongNormalizations) {
  v1::SolveResponse response = GoodNormalization();
  response.clear_plan();
  EXPECT_THAT(VerifyNormalizationAnswer(response), HasSubstr("plan"));

  response = GoodNormalization();
  *response.mutable_column_sums() = MakeTensor(std::vector<float>{1, 1.01f}, {2});
  EXPECT_THAT(VerifyNormalizationAnswer(response), HasSubstr("a column sum misses 1"));

  response = GoodNormalization();
  *response.mutable_plan() = MakeTensor(std::vector<float>{0.6f, 0.6f, 0.5f, 0.4f}, {2, 2});
  EXPECT_THAT(VerifyNormalizationAnswer(response), HasSubstr("row_sums are not those of the plan"));

  response = GoodNormalization();
  *response.mutable_plan() = MakeTensor(std::vector<float>{1.2f, -0.1f, 0.5f, 0.4f}, {2, 2});
  EXPECT_THAT(VerifyNormalizationAnswer(response), HasSubstr("negative"));

  response = GoodNormalization();
  *response.mutable_plan() = MakeTensor(std::vector<float>{NAN, 0.6f, 0.5f, 0.4f}, {2, 2});
  EXPECT_THAT(VerifyNormalizationAnswer(response), HasSubstr("plan is not finite"));

  response = GoodNormalization();
  response.mutable_convergence()->set_marginal_error_a(0.1);
  EXPECT_THAT(VerifyNormalizationAnswer(response), HasSubstr("the reply says 0.1"));
}

TEST(VerifyTest, TransportMustMatchItsCertificate) {
  const MixEntry entry = (*ParseMix("dense:2x4:tolerance=1e-3"))[0];
  const v1::SolveRequest request = MakeRequest(entry, 1, true);
  v1::SolveResponse response;
  response.add_value(1);
  *response.mutable_row_sums() = MakeTensor(std::vector<float>{0.502f, 0.498f}, {2});
  *response.mutable_column_sums() = MakeTensor(std::vector<float>{0.25f, 0.25f, 0.25f, 0.25f}, {4});
  response.mutable_convergence()->set_marginal_error_a(0.004);

  EXPECT_EQ(VerifyAnswer(entry, request, response), "");
  response.mutable_convergence()->set_converged(true);
  EXPECT_THAT(VerifyAnswer(entry, request, response), HasSubstr("says converged with a marginal error of 0.004"));
  response.mutable_convergence()->set_marginal_error_a(0.0005);
  EXPECT_THAT(VerifyAnswer(entry, request, response), HasSubstr("marginal error of the rows"));
}

TEST(VerifyTest, TheFingerprintSeesEveryBit) {
  v1::SolveResponse response = GoodNormalization();
  const uint64_t before = Fingerprint(response);
  response.mutable_execution()->set_queue_seconds(1);
  EXPECT_EQ(Fingerprint(response), before);
  (*response.mutable_plan()->mutable_data())[0] ^= 1;
  EXPECT_NE(Fingerprint(response), before);
}

// ---- Load ----

// By calls of Solve, and over streams.
class EitherLoadTest : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Load, EitherLoadTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Stream" : "Calls"; });

LoadOptions Options(const FakeServer& server, const std::string& mix) {
  LoadOptions options;
  options.target = server.target();
  options.connection.max_attempts = 1;
  options.mix = *ParseMix(mix);
  options.warmup = absl::Milliseconds(50);
  options.duration = absl::Seconds(20);  // Tests end by their number of requests.
  return options;
}

grpc::Status AnswerTimes(grpc::ServerContext*, const v1::SolveRequest&, v1::SolveResponse* response) {
  response->mutable_execution()->set_queue_seconds(0.002);
  response->mutable_execution()->set_compute_seconds(0.003);
  response->mutable_execution()->set_batch_problem_count(64);
  response->mutable_convergence()->set_iterations(20);
  response->mutable_convergence()->set_converged(true);
  absl::SleepFor(absl::Milliseconds(10));
  return grpc::Status::OK;
}

TEST_P(EitherLoadTest, ClosedLoopMeasuresAndSplits) {
  FakeServer server(AnswerTimes);  // Of a stream, one request at a time.
  LoadOptions options = Options(server, "normalization:32x4x4:20");
  options.stream = GetParam();
  options.clients = 4;
  options.connections = 4;
  options.threads = 2;
  options.requests = 100;

  const absl::StatusOr<LoadResult> result = RunLoad(options);

  ASSERT_TRUE(result.ok()) << result.status();
  const LoadStats& all = result->all;
  EXPECT_EQ(all.latency.count(), 100);
  EXPECT_EQ(all.problems, 3200);
  EXPECT_EQ(all.iterations, 2000);
  EXPECT_EQ(all.batch.Percentile(0.5), 64);
  EXPECT_GE(all.latency.Percentile(0), 10'000'000);
  EXPECT_NEAR(all.queue.mean(), 2e6, 1);
  EXPECT_NEAR(all.compute.mean(), 3e6, 1);
  EXPECT_NEAR(all.outside.mean(), all.latency.mean() - 5e6, 1e4);
  EXPECT_TRUE(all.errors.empty());
  EXPECT_GE(result->seconds, 0.01 * 100 / 4 * 0.9) << "four clients cannot be faster than the server";
  EXPECT_LE(server.solve_count(), 100 + 4 * 10) << "the warm-up";
}

TEST(LoadTest, TheMixIsDrawnByWeight) {
  FakeServer server([](auto...) { return grpc::Status::OK; });
  LoadOptions options = Options(server, "normalization:2x2:5=3,dense:2x2:5=1");
  options.requests = 2000;

  const absl::StatusOr<LoadResult> result = RunLoad(options);

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->entries[0].latency.count() + result->entries[1].latency.count(), 2000);
  EXPECT_NEAR(static_cast<double>(result->entries[0].latency.count()), 1500, 100);  // 5 standard deviations.
}

TEST_P(EitherLoadTest, ErrorsAreCountedByReason) {
  std::atomic<int> calls{0};
  FakeServer server([&calls](auto...) {
    return calls++ % 2 == 0 ? ServiceError(grpc::StatusCode::RESOURCE_EXHAUSTED, "QUEUE_FULL", "queue is full")
                            : grpc::Status::OK;
  });
  LoadOptions options = Options(server, "normalization:2x2:5");
  options.stream = GetParam();
  options.requests = 100;

  const absl::StatusOr<LoadResult> result = RunLoad(options);

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->all.errors, ElementsAre(Pair("RESOURCE_EXHAUSTED/QUEUE_FULL", 50)));
  EXPECT_EQ(result->all.latency.count(), 50);
}

TEST(LoadTest, DeadlinesHold) {
  FakeServer server([](grpc::ServerContext* context, auto...) {
    while (!context->IsCancelled()) absl::SleepFor(absl::Milliseconds(1));
    return grpc::Status::CANCELLED;
  });
  LoadOptions options = Options(server, "normalization:2x2:5");
  options.requests = 3;
  options.deadline = absl::Milliseconds(30);

  const absl::StatusOr<LoadResult> result = RunLoad(options);

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->all.errors, ElementsAre(Pair("DEADLINE_EXCEEDED", 3)));
}

TEST_P(EitherLoadTest, MissingAnswersAreErrors) {
  FakeServer server(nullptr);
  LoadOptions options = Options(server, "normalization:2x2:5");
  options.stream = GetParam();
  options.requests = 3;

  const absl::StatusOr<LoadResult> result = RunLoad(options);

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->all.errors, ElementsAre(Pair("INTERNAL", 3)));
}

TEST_P(EitherLoadTest, OpenLoopKeepsItsRate) {
  FakeServer server([](auto...) { return grpc::Status::OK; });
  LoadOptions options = Options(server, "normalization:2x2:5");
  options.stream = GetParam();
  options.rate = 1000;
  options.threads = 2;
  options.connections = 2;
  options.duration = absl::Seconds(1);

  const absl::StatusOr<LoadResult> result = RunLoad(options);

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_NEAR(static_cast<double>(result->all.latency.count()), 1000, 6 * std::sqrt(1000.0));
  EXPECT_EQ(result->start_delay.count(), result->all.latency.count());
}

// A server that stops for 400 ms once delays every request that should have been sent meanwhile. A generator that waits
// for answers before it sends would see one slow request, and a fine p90.
TEST(LoadTest, OpenLoopDoesNotOmitAStall) {
  std::atomic<int> calls{0};
  absl::Mutex mutex;
  FakeServer server([&](auto...) {
    absl::MutexLock lock(&mutex);  // One at a time.
    if (++calls == 200) absl::SleepFor(absl::Milliseconds(400));
    return grpc::Status::OK;
  });
  LoadOptions options = Options(server, "normalization:2x2:5");
  options.warmup = absl::ZeroDuration();
  options.rate = 500;
  options.duration = absl::Seconds(1);

  const absl::StatusOr<LoadResult> result = RunLoad(options);

  ASSERT_TRUE(result.ok()) << result.status();
  // About 200 of the 500 requests fall into the stall, half of them into its first 200 ms.
  EXPECT_GE(result->all.latency.Percentile(0.85), 150'000'000);
  EXPECT_GE(result->all.latency.max(), 380'000'000);
}

TEST(LoadTest, OpenLoopBoundsWhatIsInFlight) {
  FakeServer server([](auto...) {
    absl::SleepFor(absl::Milliseconds(200));
    return grpc::Status::OK;
  });
  LoadOptions options = Options(server, "normalization:2x2:5");
  options.rate = 1000;
  options.duration = absl::Milliseconds(500);
  options.max_in_flight = 4;

  const absl::StatusOr<LoadResult> result = RunLoad(options);

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_LE(result->all.latency.count(), 4 * 5);
  EXPECT_GE(result->not_sent, 300);
}

TEST(LoadTest, VerifyReportsWrongAndChangingAnswers) {
  std::atomic<int> calls{0};
  FakeServer server([&calls](grpc::ServerContext*, const v1::SolveRequest&, v1::SolveResponse* response) {
    const std::string id = response->request_id();
    *response = GoodNormalization();
    const int call = ++calls;
    if (call == 7) *response->mutable_column_sums() = MakeTensor(std::vector<float>{1, 2}, {2});
    // A change that only a comparison of bits can see.
    if (call == 9) *response->mutable_column_sums() = MakeTensor(std::vector<float>{1, 1.0000001f}, {2});
    return grpc::Status::OK;
  });
  LoadOptions options = Options(server, "normalization:2x2:20");
  options.warmup = absl::ZeroDuration();
  options.requests = 20;
  options.payloads = 1;
  options.verify = true;

  const absl::StatusOr<LoadResult> result = RunLoad(options);

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->wrong_count, 2);
  EXPECT_THAT(result->wrong, ElementsAre(HasSubstr("column sum misses 1"), HasSubstr("bits differ")));
}

TEST(LoadTest, NoServerIsAnError) {
  std::string target;
  {
    FakeServer server([](auto...) { return grpc::Status::OK; });
    target = server.target();
  }
  LoadOptions options;
  options.target = target;
  options.mix = *ParseMix("normalization:2x2");
  options.connect_timeout = absl::Milliseconds(100);
  EXPECT_EQ(RunLoad(options).status().code(), absl::StatusCode::kDeadlineExceeded);
}

// ---- Load over streams alone ----

TEST(StreamLoadTest, AStreamThatIsCutFailsWhatIsOnItAndBeginsAgain) {
  std::atomic<int> calls{0};
  FakeServer server([&calls](grpc::ServerContext* context, auto...) {
    if (++calls % 10 == 0) context->TryCancel();
    return grpc::Status::OK;
  });
  LoadOptions options = Options(server, "normalization:2x2:5");
  options.stream = true;
  options.warmup = absl::ZeroDuration();
  options.clients = 3;
  options.requests = 200;

  const absl::StatusOr<LoadResult> result = RunLoad(options);

  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_THAT(result->all.errors, ElementsAre(Pair("CANCELLED", testing::AllOf(testing::Ge(10), testing::Le(80)))));
  EXPECT_EQ(result->all.latency.count() + result->all.errors.at("CANCELLED"), 200);
}

TEST(StreamLoadTest, WhatIsUnansweredAtTheEndIsCutOff) {
  FakeServer server([](grpc::ServerContext* context, auto...) {
    while (!context->IsCancelled()) absl::SleepFor(absl::Milliseconds(1));
    return grpc::Status::CANCELLED;
  });
  LoadOptions options = Options(server, "normalization:2x2:5");
  options.stream = true;
  options.warmup = absl::ZeroDuration();
  options.clients = 2;
  options.duration = absl::Milliseconds(50);
  options.drain = absl::Milliseconds(50);

  const absl::StatusOr<LoadResult> result = RunLoad(options);

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->all.errors, ElementsAre(Pair("DEADLINE_EXCEEDED", 2)));
}

}  // namespace
}  // namespace sinkhorn::client
