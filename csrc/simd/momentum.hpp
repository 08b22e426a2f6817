// What a channel remembers, moved on by one round.
#pragma once

#include "vector.hpp"

namespace laconic {
namespace {

// velocity = m * velocity + x; residual += velocity. One pass, because memory sets the pace.
void add_momentum(const float* __restrict x, float m, float* __restrict velocity, float* __restrict residual,
                  int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float v = velocity[i] * m + x[i];
    velocity[i] = v;
    residual[i] += v;
  }
}

}  // namespace
}  // namespace laconic
