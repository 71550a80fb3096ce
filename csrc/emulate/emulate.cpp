// The native ops as a program of their own, for tests of units that this machine cannot run: built for another processor and run by
// an emulator, it is sent each call of an op with the memory that the call can reach, makes it and sends back what changed.
// `tests/support/emulated.py` is the other end; all numbers on the wire are 64-bit words.
//
// Memory lies at other addresses here than at the sender's, so the sender says which words hold addresses, and of what.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "isa.h"
#include "op_table.h"
#include "pool.h"

namespace quire {
namespace {

// Bytes of standard input and output; the sender's end of the pipe is this program's.
void read_bytes(void* to, size_t size) {
    if (std::fread(to, 1, size, stdin) != size) std::exit(0);
}
void write_bytes(const void* from, size_t size) {
    if (std::fwrite(from, 1, size, stdout) != size) std::exit(1);
}
int64_t read_word() {
    int64_t word = 0;
    read_bytes(&word, 8);
    return word;
}
void write_word(int64_t word) { write_bytes(&word, 8); }
void write_text(const std::string& text) {
    write_word(static_cast<int64_t>(text.size()));
    write_bytes(text.data(), text.size());
}

// A piece of the sender's memory, at the same place of a page as there: kernels ask for alignment.
class Region {
   public:
    Region(int64_t place, int64_t size) : before_(static_cast<size_t>(size)) {
        constexpr size_t kPage = size_t{2} << 20;
        const size_t skip = static_cast<size_t>(place) % 4096;
        area_ = std::aligned_alloc(kPage, (skip + before_.size() + kPage) / kPage * kPage);
        if (!area_) throw std::bad_alloc();
        data_ = static_cast<char*>(area_) + skip;
        read_bytes(data_, before_.size());
    }
    Region(const Region&) = delete;
    ~Region() { std::free(area_); }

    char* data() { return data_; }
    void remember() { std::memcpy(before_.data(), data_, before_.size()); }
    void send_if_changed() {
        const bool changed = std::memcmp(before_.data(), data_, before_.size()) != 0;
        write_word(changed);
        if (changed) write_bytes(data_, before_.size());
    }

   private:
    void* area_ = nullptr;
    char* data_ = nullptr;
    std::vector<char> before_;
};

// A word of a region that holds an address inside another one.
struct Link {
    char* at;
    int64_t theirs, ours;

    void put(int64_t from, int64_t to) const {
        int64_t word = 0;
        std::memcpy(&word, at, 8);
        if (word == from) std::memcpy(at, &to, 8);
    }
};

void run_call() {
    const int64_t id = read_word(), count = read_word();
    std::vector<Slot> slots(static_cast<size_t>(count));
    for (Slot& slot : slots) slot.i = read_word();
    std::vector<Region*> regions(static_cast<size_t>(read_word()));
    for (Region*& region : regions) {
        const int64_t place = read_word(), size = read_word();
        region = new Region(place, size);
        region->remember();
    }
    const auto target = [&] {  // of a link: region, place in it
        const int64_t region = read_word(), at = read_word();
        return regions[static_cast<size_t>(region)]->data() + at;
    };
    for (int64_t i = read_word(); i > 0; --i) {
        Slot& slot = slots[static_cast<size_t>(read_word())];
        slot.i = reinterpret_cast<int64_t>(target());
    }
    std::vector<Link> links(static_cast<size_t>(read_word()));
    for (Link& link : links) {
        link.at = target();
        std::memcpy(&link.theirs, link.at, 8);
        link.ours = reinterpret_cast<int64_t>(target());
        link.put(link.theirs, link.ours);
    }
    std::string error;
    try {
        op_of_id(id).call(slots.data());
    } catch (const std::exception& caught) {
        error = *caught.what() ? caught.what() : "the op failed";
    }
    for (const Link& link : links) link.put(link.ours, link.theirs);
    write_text(error);
    for (Region* region : regions) {
        region->send_if_changed();
        delete region;
    }
}

// The units, best first; then unit ("" of ops that exist once), name and signature of each op of the table.
void greet() {
    write_word(static_cast<int64_t>(supported_units().size()));
    for (const Unit& unit : supported_units()) write_text(unit.name);
    write_word(static_cast<int64_t>(op_table().size()));
    for (const TableOp& op : op_table()) {
        write_text(op.unit);
        write_text(op.name);
        write_text(op.signature);
    }
}

}  // namespace
}  // namespace quire

// First the list of units and ops; then, for each request, its kind: 0 sets the number of threads, 1 makes a call.
int main() {
    using namespace quire;
    greet();
    while (true) {
        std::fflush(stdout);
        if (read_word() == 0) set_thread_count(static_cast<int>(read_word()), false);
        else run_call();
    }
}
