#include "server/scheduler_tenants.h"

#include <algorithm>

namespace sinkhorn {

TenantAccounts::Account& TenantAccounts::at(int tenant) {
  if (tenant >= static_cast<int>(accounts_.size())) accounts_.resize(tenant + 1);
  return accounts_[tenant];
}

void TenantAccounts::Seen(int tenant, double weight, absl::Time now) {
  Account& account = at(tenant);
  account.weight = weight;
  account.seen = now;
}

void TenantAccounts::Add(int tenant, int64_t bytes, int64_t predicted_ns) {
  Account& account = accounts_[tenant];
  if (account.requests == 0) {
    bool others = false;
    double least = 0;
    for (const Account& other : accounts_) {
      if (other.requests == 0) continue;
      least = others ? std::min(least, other.virtual_seconds) : other.virtual_seconds;
      others = true;
    }
    account.virtual_seconds = std::max(account.virtual_seconds, (others ? least : now_) - kCredit);
  }
  account.requests += 1;
  account.waiting += 1;
  account.bytes += bytes;
  account.backlog_ns += predicted_ns;
}

void TenantAccounts::Remove(int tenant, int64_t bytes, int64_t remaining_ns) {
  Account& account = accounts_[tenant];
  account.requests -= 1;
  account.bytes -= bytes;
  account.backlog_ns -= remaining_ns;
}

void TenantAccounts::Charge(int tenant, double seconds) {
  Account& account = accounts_[tenant];
  account.virtual_seconds += seconds / account.weight;
  now_ = account.virtual_seconds;
}

double TenantAccounts::Slowdown(int tenant) const {
  double weights = accounts_[tenant].weight;
  for (size_t i = 0; i < accounts_.size(); ++i) {
    if (static_cast<int>(i) != tenant && accounts_[i].requests > 0) weights += accounts_[i].weight;
  }
  return weights / accounts_[tenant].weight;
}

double TenantAccounts::Share(int tenant, absl::Time since) const {
  double weights = accounts_[tenant].weight;
  for (size_t i = 0; i < accounts_.size(); ++i) {
    const Account& other = accounts_[i];
    if (static_cast<int>(i) != tenant && (other.requests > 0 || other.seen >= since)) weights += other.weight;
  }
  return accounts_[tenant].weight / weights;
}

}  // namespace sinkhorn
