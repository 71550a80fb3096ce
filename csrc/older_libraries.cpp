// What headers of GCC 12 ask of libstdc++ and that of GCC 8 lacks, so that a build runs where manylinux_2_28 does.
// What is defined here stays within the extension (exports.map).
#include <new>

#if defined(__GLIBCXX__)
namespace std {

// Since 3.4.29: containers' allocators call it.
void __throw_bad_array_new_length() { throw bad_array_new_length(); }

}  // namespace std
#endif
