// The momentum of a channel.
#pragma once

#include "vector.hpp"

namespace laconic {
namespace {

// velocity = m * velocity + x; residual += velocity. One pass, because memory bandwidth is the limit.
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
