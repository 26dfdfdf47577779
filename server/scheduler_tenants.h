// What each tenant has had of the device and holds of the queue. No lock and no clock: the scheduler has both.
//
// Tenants share by weight. A tenant's virtual time is the device time that its tasks have had, divided by its weight;
// whoever's is least goes first. One that comes back after a silence has no claim to the time that others used
// meanwhile, but for kCredit: a quiet tenant is served at once.
//
// Virtual times of two tenants that both have work all the time stay within kCredit and a few slices of each other.
#ifndef SINKHORN_SERVER_SCHEDULER_TENANTS_H_
#define SINKHORN_SERVER_SCHEDULER_TENANTS_H_

#include <cstdint>
#include <vector>

#include "absl/time/time.h"

namespace sinkhorn {

class TenantAccounts {
 public:
  struct Account {
    double weight = 1;
    double virtual_seconds = 0;
    int64_t requests = 0;     // Accepted and not finished.
    int64_t waiting = 0;      // Of these, not resident.
    int64_t bytes = 0;        // Of all of them.
    int64_t backlog_ns = 0;   // What they are predicted to take yet.
    int64_t resident_ns = 0;  // The residents' part of it.
    absl::Time seen = absl::InfinitePast();
  };

  // An account, made when first asked for. `tenant` >= 0 and bounded by whoever numbers tenants.
  Account& at(int tenant);
  const Account& at(int tenant) const { return accounts_[tenant]; }

  // A task of the tenant has come, whether it is accepted or not.
  void Seen(int tenant, double weight, absl::Time now);
  // It is accepted.
  void Add(int tenant, int64_t bytes, int64_t predicted_ns);
  // It has ended, with `remaining_ns` of the prediction left.
  void Remove(int tenant, int64_t bytes, int64_t remaining_ns);
  // Its task had `seconds` of the device.
  void Charge(int tenant, double seconds);

  // Who goes next: less is earlier. With what its residents still have to get: for tasks that are to become resident.
  double Turn(int tenant) const { return accounts_[tenant].virtual_seconds; }
  double TurnWithResidents(int tenant) const {
    const Account& account = accounts_[tenant];
    return account.virtual_seconds + static_cast<double>(account.resident_ns) * 1e-9 / account.weight;
  }

  // The sum of the weights of tenants that have work now, and of this one, over its own: how many times longer its work
  // takes than it would alone.
  double Slowdown(int tenant) const;
  // This tenant's part, by weight, of what those seen since `since` share. 1: it is alone.
  double Share(int tenant, absl::Time since) const;

  static constexpr double kCredit = 0.1;  // Seconds of the device, times the weight.

 private:
  std::vector<Account> accounts_;
  double now_ = 0;  // Virtual time of the tenant charged last.
};

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_SCHEDULER_TENANTS_H_
