#include "server/tenants.h"

#include <openssl/sha.h>

#include <cmath>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/log.h"

namespace sinkhorn {

absl::StatusOr<Tenants::Weights> Tenants::Read() const {
  Weights weights;
  const absl::Status read = file_->Read([&weights](std::string line) -> std::string {
    const size_t space = line.find_last_of(" \t");  // Subjects have spaces.
    double weight = 0;
    if (space == std::string::npos || !absl::SimpleAtod(line.substr(space + 1), &weight) || !(weight > 0) ||
        std::isinf(weight)) {
      return "an identity and a weight > 0";
    }
    const std::string identity(absl::StripAsciiWhitespace(line.substr(0, space)));
    if (identity == "*") {
      weights.others = weight;
    } else {
      weights.named[identity] = weight;
      weights.order.push_back(identity);
    }
    return "";
  });
  if (!read.ok()) return read;
  return weights;
}

absl::StatusOr<std::unique_ptr<Tenants>> Tenants::Load(const std::string& path) {
  auto tenants = std::make_unique<Tenants>();
  tenants->file_ = std::make_unique<LineFile>("tenant file", path);
  absl::StatusOr<Weights> weights = tenants->Read();
  if (!weights.ok()) return weights.status();
  tenants->Take(*std::move(weights));
  return tenants;
}

void Tenants::Refresh(absl::Time now) {
  if (file_ == nullptr || !file_->IsDue(now)) return;
  absl::StatusOr<Weights> weights = Read();
  if (!weights.ok())
    return Log(Severity::kError, "tenants_unchanged", {{"why", std::string(weights.status().message())}});
  std::lock_guard<std::mutex> lock(mutex_);
  if (*weights == weights_) return;
  Log(Severity::kInfo, "tenants_changed", {{"count", absl::StrCat(weights->named.size())}});
  Take(*std::move(weights));
}

// REQUIRES: the lock is held, or nobody else knows this yet.
void Tenants::Take(Weights weights) {
  weights_ = std::move(weights);
  for (const std::string& identity : weights_.order) {
    if (labels_.size() < kLabels && !absl::c_linear_search(labels_, identity)) labels_.push_back(identity);
  }
  for (auto& entry : entries_) entry.second.tenant = Weighed(entry.second.tenant.number, entry.first);
}

// What the file says of it.
Tenant Tenants::Weighed(int number, const std::string& identity) const {
  const auto named = weights_.named.find(identity);
  if (named == weights_.named.end()) return {number, weights_.others, 0};
  const auto label = absl::c_find(labels_, identity);
  return {number, named->second, label == labels_.end() ? 0 : static_cast<int>(label - labels_.begin())};
}

Tenant Tenants::Of(absl::string_view identity, absl::Time now) {
  Refresh(now);
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = entries_.find(identity);
  if (found == entries_.end()) {
    const int number = TakeNumber(now);
    if (number == 0) return Tenant();
    std::string name(identity);
    const Tenant tenant = Weighed(number, name);
    found = entries_.emplace(std::move(name), Entry{tenant, now}).first;
  }
  found->second.seen = now;
  return found->second.tenant;
}

// A number that nobody has; 0: there is none.
int Tenants::TakeNumber(absl::Time now) {
  if (used_ < kTenants) return ++used_;
  for (auto it = entries_.begin(); free_.empty() && it != entries_.end();) {
    if (now - it->second.seen < kForget) {
      ++it;
      continue;
    }
    free_.push_back(it->second.tenant.number);
    it = entries_.erase(it);
  }
  if (free_.empty()) return 0;
  const int number = free_.back();
  free_.pop_back();
  return number;
}

int Tenants::count() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(entries_.size());
}

std::vector<std::string> Tenants::labels() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return labels_;
}

std::string PeerIdentity(absl::string_view peer) {
  const bool has_port = absl::StartsWith(peer, "ipv4:") || absl::StartsWith(peer, "ipv6:");
  return absl::StrCat("peer:", has_port ? peer.substr(0, peer.rfind(':')) : peer.substr(0, peer.find(':')));
}

std::string TokenIdentity(absl::string_view token) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), digest);
  return absl::StrCat("token:", absl::BytesToHexString(absl::string_view(reinterpret_cast<char*>(digest), 6)));
}

}  // namespace sinkhorn
