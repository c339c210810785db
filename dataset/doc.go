// SPDX-License-Identifier: Apache-2.0

// Package dataset is the manifest: a directory tree as flat, pointer-free
// arrays, and the layout of its regular files, end to end, in one volume.
//
// A target scans a directory ([Open], [Refresh]) into a [Tree]: the [Manifest],
// which it sends to initiators, and the [File] ranges, which it keeps, to know
// which file to read for which part of the volume.
//
// # Layout
//
// Regular files lie in path order (directory by directory, names bytewise).
// Files of 64 KiB and more begin on a page, so that direct I/O and page-sized
// reads never straddle two files; the padding costs them at most 1/16. Smaller
// ones are packed, so that one extent carries many. A hard-linked file lies
// there once. An empty file has no bytes and the offset 0. Holes of sparse files
// take part of the volume, but not of anybody's disk; their st_blocks is kept.
//
// A layout has a random id. A [Rescan] keeps the id and the ranges of all files
// that have not changed, also of those that now have another name; new and
// changed ones come behind the end, in an extent of their own, and no range is
// ever used again. So whoever caches by (layout id, offset) is never wrong,
// whatever happens at the target and however late he hears of it. A range whose
// file has changed or gone stays as a stale [File], which is refused to whoever
// still reads by an older manifest. The generation grows by one with each scan
// that finds a difference, and by none else. The price is address space, and the
// fill of one extent for each generation; a new layout (the export removed and
// added, or its state file deleted) gives both back.
//
// A file has changed when device, inode, size, mtime or ctime have. See
// [Ident.Settle] for what a clock's tick can hide. Writers through mmap are
// outside the promise: they change bytes without changing ctime at once.
//
// # Across restarts
//
// A tree is saved before anybody may see it, and Open goes on with the saved
// layout, so that initiators go on too. A saved tree that is corrupt, or gone,
// means a new layout. It must never be replaced by an older copy of itself:
// ranges given since would be given again. Where device numbers change with a
// reboot, all files count as changed.
//
// # What a tree holds
//
// Regular files, directories and symbolic links, any names that the file system
// has (they are bytes), hard links, all permission bits, owners, mtimes in
// nanoseconds, and extended attributes of the user.* namespace: the others are
// rights and labels of the target's machine and mean nothing elsewhere. A link
// count is the number of names in the tree, and 2 + subdirectories for a
// directory. Symbolic links are kept as they are, wherever they lead.
//
// Sockets, FIFOs and devices are counted and left out. A file that may not be
// read is counted, and in the tree; reading it fails at the target. A directory
// that cannot be read is counted, and in the tree, empty. Names that vanish
// while the scan looks are counted and left out. The scan goes into file systems
// that are mounted below the directory, and keeps their inodes apart. It fails,
// rather than to leave out what is there, when the directory itself cannot be
// read, and when descriptors or memory run out.
//
// The scan opens directories relative to their parents, without following
// symlinks, so who may write to the tree cannot lead it out of it, and paths may
// be longer than PATH_MAX. Directories more than 4096 deep count as unreadable.
//
// # Encoding of a manifest, version 1
//
// Little-endian.
//
//	"RBLKDSET"  u32 version  u64 generation  u64 size of the volume
//	u16 length and bytes of the layout id (1 to 64 of 0-9 a-z)
//	u64 count and nodes, 72 bytes each; node 0 is zero, node 1 the root:
//	    u64 size  u64 offset  u64 st_blocks  i64 mtime  u32 its nanoseconds
//	    u32 mode  u32 nlink  u32 uid  u32 gid
//	    u32 u32 begin and length: a directory's entries, a symlink's target
//	    u32 parent of a directory
//	    u32 u32 begin and length of its attributes
//	u64 count and entries, 12 bytes each, sorted by name within a directory:
//	    u32 u32 begin and length of the name  u32 node
//	u64 length and bytes of the names, of the symlinks' targets, of the attributes
//	    (attribute: u8 length of name, u32 length of value, name, value)
//	u64 xxhash64 of all before it
//
// A decoder trusts nothing: [Decode] refuses whatever an accessor could fail or
// loop on, and takes little more memory than the encoding's length. What it
// accepts encodes to the same bytes again. The digest of a manifest is of its
// encoding, and serves as its ETag. On the wire it is packed
// with zstd ([Compress]); [Decompress] takes the caller's limit.
package dataset
