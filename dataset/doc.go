// SPDX-License-Identifier: Apache-2.0

// Package dataset is the manifest: a directory tree as flat, pointer-free
// arrays, and the layout of its regular files, end to end, in one volume.
//
// # Layout
//
// Regular files lie in path order (directory by directory, names bytewise).
// Files of alignFrom bytes and more begin on a page, so that direct I/O and
// page-sized reads never straddle two files; smaller ones are packed, so that
// one extent carries many. A hard-linked file lies there once.
//
// A layout has a random id. A rescan keeps it and the offsets of every
// unchanged file, appends new and changed ones, and never uses a range again:
// whoever caches by (layout id, offset) is never wrong. A file is unchanged when
// device, inode, size, mtime and ctime are.
//
// # What a tree may hold
//
// Regular files, directories and symbolic links, any names, hard links, modes
// with all permission bits, owners, mtimes in nanoseconds, and extended
// attributes of the user.* namespace. Sockets, FIFOs and devices are counted and
// left out. The scan descends into other file systems mounted below the
// directory. A directory that cannot be read is there, empty, and counted.
//
// # Encoding
//
// Little-endian: "RBLKDSET", u32 version, u64 generation, u64 volume size,
// layout id (u16 length), then each array behind its u64 length (nodes, entries,
// names, links, xattrs), then the xxhash64 of all before it. A decoder trusts
// nothing: see validate.
package dataset
