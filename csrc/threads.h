// The kernels' threads: one pool for the process, asleep between calls.
#pragma once

#include <cstdint>
#include <functional>

namespace longfill {

// Calls work(task, thread) once for every task in [0, tasks), on at most `num_threads` threads of which the caller is
// number 0. Tasks are handed out in ascending order, one at a time, so each must be worth a few microseconds; which
// thread gets which is left open, so no result may depend on it. An exception of `work` is rethrown here after all
// threads have stopped. Calls from several threads at once take turns; a call from within `work` is not allowed.
void for_tasks(int num_threads, std::int64_t tasks, const std::function<void(std::int64_t task, int thread)>& work);

// Tasks done since the process began, by all threads: while a kernel runs, however long, it grows.
std::uint64_t tasks_done();

}  // namespace longfill
