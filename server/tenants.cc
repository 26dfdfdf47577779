#include "server/tenants.h"

#include <openssl/sha.h>

#include <cmath>
#include <fstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace sinkhorn {

absl::StatusOr<std::unique_ptr<Tenants>> Tenants::Load(const std::string& path) {
  std::ifstream file(path);
  if (!file) return absl::InvalidArgumentError(absl::StrCat("tenant file '", path, "' cannot be read"));
  auto tenants = std::make_unique<Tenants>();
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    absl::StripAsciiWhitespace(&line);
    if (line.empty() || line[0] == '#') continue;
    const size_t space = line.find_last_of(" \t");  // Subjects have spaces.
    double weight = 0;
    if (space == std::string::npos || !absl::SimpleAtod(line.substr(space + 1), &weight) || !(weight > 0) ||
        std::isinf(weight)) {
      return absl::InvalidArgumentError(
          absl::StrCat("tenant file '", path, "': line ", number, " must be an identity and a weight > 0"));
    }
    const std::string identity(absl::StripAsciiWhitespace(line.substr(0, space)));
    if (identity == "*") {
      tenants->other_weight_ = weight;
    } else {
      tenants->weights_[identity] = weight;
    }
  }
  return tenants;
}

double Tenants::WeightOf(const std::string& identity) const {
  const auto found = weights_.find(identity);
  return found != weights_.end() ? found->second : other_weight_;
}

Tenant Tenants::Of(absl::string_view identity, absl::Time now) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = entries_.find(identity);
  if (found == entries_.end()) {
    const int number = TakeNumber(now);
    if (number == 0) return Tenant();
    std::string name(identity);
    const Tenant tenant = {number, WeightOf(name)};
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
