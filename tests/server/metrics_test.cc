// The numbers behind /metrics, and what Prometheus reads.
#include "server/metrics.h"

#include <cmath>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "prometheus/text_serializer.h"
#include "tests/server/service_fixture.h"

namespace sinkhorn {
namespace {

using testing::HasSubstr;

TEST(HistogramTest, BucketsAreUpToAndIncludingTheirBound) {
  const std::vector<double> bounds = {1, 10};
  Histogram histogram(bounds);
  for (double value : {0.5, 1.0, 1.5, 10.0, 11.0, -3.0}) histogram.Observe(value);
  prometheus::ClientMetric metric;
  histogram.Collect(&metric);
  ASSERT_EQ(metric.histogram.bucket.size(), 3u);
  EXPECT_EQ(metric.histogram.bucket[0].cumulative_count, 3u);
  EXPECT_EQ(metric.histogram.bucket[1].cumulative_count, 5u);
  EXPECT_EQ(metric.histogram.bucket[2].cumulative_count, 6u);
  EXPECT_TRUE(std::isinf(metric.histogram.bucket[2].upper_bound));
  EXPECT_EQ(metric.histogram.sample_count, 6u);
  EXPECT_DOUBLE_EQ(metric.histogram.sample_sum, 21);
}

TEST(HistogramTest, NothingIsLostBetweenThreads) {
  const std::vector<double> bounds = {1};
  Histogram histogram(bounds);
  Counter counter;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 10000; ++j) {
        histogram.Observe(0.5);
        counter.Add(2);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  prometheus::ClientMetric metric;
  histogram.Collect(&metric);
  EXPECT_EQ(metric.histogram.sample_count, 80000u);
  EXPECT_DOUBLE_EQ(metric.histogram.sample_sum, 40000);
  EXPECT_EQ(counter.value(), 160000);
}

using MetricsTest = ServiceTest;

TEST_F(MetricsTest, EveryNameIsThereAfterSomeTraffic) {
  scheduler_options_.max_queue_bytes = 1000;
  Start();
  EXPECT_TRUE(Solve(Dense()).ok());
  v1::SolveRequest too_many_bytes;
  *too_many_bytes.mutable_normalization()->mutable_logits() = Filled({1, 1000}, 0);
  EXPECT_FALSE(Solve(too_many_bytes).ok());
  backend_.hold = true;
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Milliseconds(50)));
  v1::SolveResponse response;
  EXPECT_FALSE(Solve(Dense(), &response, &context).ok());
  ASSERT_TRUE(Eventually([this] { return service_->requests_in_flight() == 0; }));

  const std::string text = prometheus::TextSerializer().Serialize(metrics_.Collect());
  for (const char* line : {
           "grpc_server_call_started_total{grpc_method=\"sinkhorn.v1.SinkhornService/Solve\"} 3",
           "grpc_server_call_duration_seconds_count{grpc_method=\"sinkhorn.v1.SinkhornService/"
           "Solve\",grpc_status=\"OK\"} 1",
           "grpc_server_call_duration_seconds_count{grpc_method=\"sinkhorn.v1.SinkhornService/Solve\","
           "grpc_status=\"RESOURCE_EXHAUSTED\"} 1",
           "sinkhorn_build_info{version=\"1.2.3\",commit=\"abc\",cuda=\"no\"",
           "sinkhorn_server_state{state=\"ready\"} 1",
           "sinkhorn_server_state{state=\"draining\"} 0",
           "sinkhorn_requests_in_flight 0",
           "sinkhorn_requests_rejected_total{reason=\"QUEUE_FULL\"} 1",
           "sinkhorn_requests_abandoned_total{stage=\"running\",cause=\"deadline\"} 1",
           "sinkhorn_wasted_device_seconds_total{cause=\"deadline\"} 0.",
           "sinkhorn_stage_duration_seconds_count{stage=\"decode\"} 2",
           "sinkhorn_stage_duration_seconds_count{stage=\"queue\"} 2",
           "sinkhorn_stage_duration_seconds_count{stage=\"solve\"} 2",
           "sinkhorn_stage_duration_seconds_count{stage=\"encode\"} 1",
           "sinkhorn_stage_duration_seconds_bucket{stage=\"solve\",le=\"0.0001\"}",
           "sinkhorn_queue_requests 0",
           "sinkhorn_queue_bytes 0",
           "sinkhorn_queue_predicted_seconds 0",
           "sinkhorn_queue_oldest_age_seconds 0",
           "sinkhorn_batches_total{device=\"fake:0\",family=\"all\"}",
           "sinkhorn_batch_problems_count{family=\"all\"}",
           "sinkhorn_iterations_count{problem=\"dense\"} 1",
           "sinkhorn_marginal_error_sum{problem=\"dense\"} 0.25",
           "sinkhorn_outcomes_total{problem=\"dense\",outcome=\"TOLERANCE\"} 1",
           "sinkhorn_outcomes_total{problem=\"dense\",outcome=\"EXPIRED\"} 1",
           "sinkhorn_device_busy_seconds_total{device=\"fake:0\"}",
           "sinkhorn_device_memory_bytes{device=\"fake:0\",pool=\"total\"} 1048576",
           "sinkhorn_device_healthy{device=\"fake:0\"} 1",
           "process_cpu_seconds_total",
           "process_resident_memory_bytes",
           "process_open_fds",
           "process_start_time_seconds",
       }) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

TEST_F(MetricsTest, ProcessNumbersAreThisProcess) {
  std::map<std::string, double> values;
  for (const prometheus::MetricFamily& family : metrics_.Collect()) {
    if (family.name.rfind("process_", 0) != 0) continue;
    ASSERT_EQ(family.metric.size(), 1u);
    values[family.name] = family.metric[0].gauge.value + family.metric[0].counter.value;
  }
  EXPECT_GT(values["process_resident_memory_bytes"], 1e6);
  EXPECT_LT(values["process_resident_memory_bytes"], 1e11);
  EXPECT_GE(values["process_open_fds"], 3);
  EXPECT_LT(values["process_open_fds"], 1000);
  EXPECT_GE(values["process_cpu_seconds_total"], 0);
  EXPECT_LT(values["process_cpu_seconds_total"], 600);
  const double now = absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch());
  EXPECT_NEAR(values["process_start_time_seconds"], now, 600);
}

TEST_F(MetricsTest, FamiliesAreListedOnce) {
  Start();
  std::set<std::string> names;
  for (const prometheus::MetricFamily& family : metrics_.Collect()) {
    EXPECT_TRUE(names.insert(family.name).second) << family.name;
    EXPECT_FALSE(family.help.empty()) << family.name;
  }
}

}  // namespace
}  // namespace sinkhorn
